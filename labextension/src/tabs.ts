// Tabs of the page.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { TabPanel, type Widget } from '@lumino/widgets';

/** Where a tab can be. The page of Notebook 7 has room for one widget in its main area only. */
const AREAS = ['main', 'down'];

/** Show the tab of this name; make it if there is none. */
export function showTab(shell: JupyterFrontEnd.IShell, name: string, make: () => Widget): void {
  const tabs = AREAS.flatMap(area => [...shell.widgets(area)]);
  const tab = tabs.find(each => each.id === name) ?? added(shell, make());
  const panel = tab.parent?.parent;
  if (panel instanceof TabPanel) {
    panel.currentWidget = tab; // Notebook 7 does not do that when it activates a tab
  }
  shell.activateById(name);
}

/** Add a tab to the first area that takes it: Notebook 7 says nothing when it takes none. */
function added(shell: JupyterFrontEnd.IShell, tab: Widget): Widget {
  for (const area of AREAS) {
    shell.add(tab, area);
    if (tab.isAttached) {
      return tab;
    }
  }
  tab.dispose();
  throw new Error('This page has no room for another tab.');
}
