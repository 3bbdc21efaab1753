// Bundles lib/ for JupyterLab into ../gpunb/labextension, with the drawing of lanes, which the
// widget and this extension share.

import { execFileSync } from 'node:child_process';
import { copyFileSync, rmSync } from 'node:fs';
import { createRequire } from 'node:module';
import { fileURLToPath } from 'node:url';

const here = path => fileURLToPath(new URL(path, import.meta.url));
const find = createRequire(import.meta.url).resolve;

const monitor = name => here(`../gpunb/notebook/monitor/${name}`);
copyFileSync(monitor('view.js'), here('lib/view.js'));
copyFileSync(monitor('view.css'), here('style/view.css'));
rmSync(here('../gpunb/labextension'), { recursive: true, force: true });
execFileSync(
  process.execPath,
  [
    find('@jupyter/builder/lib/build-labextension.js'),
    '--core-package-file',
    find('@jupyterlab/core-meta/core.package.json'),
    here('.')
  ],
  { stdio: ['ignore', 'inherit', 'inherit'] }
);
