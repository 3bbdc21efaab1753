// The machine's view of gpunb for JupyterLab and Notebook 7.

import {
  ILayoutRestorer,
  type JupyterFrontEnd,
  type JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ICommandPalette, Notification } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';

import { Badges } from './badges';
import { insertGpuCell, runOnGpu } from './cells';
import { Connection } from './connection';
import { icon } from './icon';
import { logTab, tabOf } from './logs';
import { remembered } from './memory';
import { isSweep } from './merge';
import { Navigation } from './navigation';
import { PANEL, Panel } from './panel';
import { StatusItem } from './status';
import { showTab } from './tabs';
import { Toasts, type Wanted } from './toasts';
import type { Job } from './types';
import type { Actions } from './view/index.js';

const OPEN = 'gpunb:open-panel';
const RUN = 'gpunb:run-cell';
const INSERT = 'gpunb:insert-cell';

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'gpunb:plugin',
  description: 'What runs on the GPUs of this machine.',
  autoStart: true,
  requires: [INotebookTracker, IRenderMimeRegistry],
  optional: [ICommandPalette, IStatusBar, ISettingRegistry, ILayoutRestorer],
  activate
};

function activate(
  app: JupyterFrontEnd,
  tracker: INotebookTracker,
  rendermime: IRenderMimeRegistry,
  palette: ICommandPalette | null,
  statusBar: IStatusBar | null,
  settings: ISettingRegistry | null,
  restorer: ILayoutRestorer | null
): void {
  const connection = new Connection(app.serviceManager.serverSettings);
  const navigation = new Navigation(app, tracker);
  const goTo = (job: Job) => navigation.goTo(job);
  const openLogs = async (job: Job) =>
    showTab(app.shell, tabOf(job), () => logTab(connection, rendermime, job));
  const { baseUrl } = app.serviceManager.serverSettings;
  const memory = remembered(localStorage, baseUrl, () => status.draw());
  const insert = () => void app.commands.execute(INSERT);
  const panel = new Panel(connection, { ...actionsOf(connection), goTo, openLogs }, memory, insert);
  app.shell.add(panel, 'right', { rank: 900, type: 'GPUs' });
  restorer?.add(panel, PANEL);
  const open = () => app.shell.activateById(PANEL);
  const status = new StatusItem(connection, memory, open);

  const badges = new Badges(tracker, connection, async key => {
    try {
      // Also of one that waits, or did when this was drawn: the session knows what it is now.
      await connection.request(isSweep(key) ? 'stop' : 'interrupt', key);
    } catch (error) {
      Notification.error((error as Error).message, { autoClose: 8000 });
    }
  });
  const toasts = new Toasts(connection, goTo);

  app.commands.addCommand(OPEN, { label: 'Open GPU Panel', icon, execute: open });
  app.commands.addCommand(RUN, {
    label: 'Run Cell on GPU…',
    icon: args => (args['isPalette'] ? undefined : icon),
    isEnabled: () => tracker.activeCell?.model.type === 'code',
    execute: () => runOnGpu(tracker, connection.snapshot)
  });
  app.commands.addCommand(INSERT, {
    label: 'Insert GPU Cell',
    execute: () => insertGpuCell(tracker)
  });
  app.contextMenu.addItem({ command: RUN, selector: '.jp-Notebook .jp-CodeCell', rank: 0.5 });
  for (const command of [OPEN, RUN, INSERT]) {
    palette?.addItem({ command, category: 'GPU', args: { isPalette: true } });
  }
  statusBar?.registerStatusItem('gpunb:status', {
    item: status,
    align: 'left',
    rank: 30
  });

  void configured(settings, wanted => {
    connection.interval = wanted.interval;
    badges.enabled = wanted.badges;
    toasts.wanted = wanted.toasts;
  }).then(() => connection.open());
}

function actionsOf(connection: Connection): Actions {
  return {
    cancel: async (key, force) => void (await connection.request('cancel', key, { force })),
    interrupt: async key => void (await connection.request('interrupt', key)),
    kill: async key => void (await connection.request('kill', key)),
    stop: async key => void (await connection.request('stop', key))
  };
}

interface Settings {
  interval: number;
  badges: boolean;
  toasts: Wanted;
}

/** Apply the settings now and whenever they change; the defaults where there are none. */
async function configured(
  registry: ISettingRegistry | null,
  apply: (wanted: Settings) => void
): Promise<void> {
  try {
    const settings = await registry?.load(plugin.id);
    if (settings) {
      const changed = () => apply(settings.composite as unknown as Settings);
      settings.changed.connect(changed);
      changed();
    }
  } catch (error) {
    console.warn('gpunb: the settings cannot be read, so the defaults are used.', error);
  }
}

export default plugin;
