import { LabIcon } from '@jupyterlab/ui-components';

/** A board with a chip, in the colours of the theme. */
export const icon = new LabIcon({
  name: 'gpunb:gpu',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <path class="jp-icon3" fill="#616161" fill-rule="evenodd" d="M2 5h19a1 1 0 0 1 1 1v10a1 1 0 0 1-1 1h-2v2h-2v-2h-2v2h-2v-2H5v3H3V7H2zm3 2v8h15V7zm5 1.5a2.5 2.5 0 1 1 0 5 2.5 2.5 0 0 1 0-5zM14.500 9h4v1.500h-4zm0 2.500h4V13h-4z"/>
</svg>`
});
