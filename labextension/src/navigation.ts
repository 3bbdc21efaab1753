// From a job to its cell.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

import { PendingNavigations } from './pending_navigation';
import type { Job } from './types';

/** Shows the cell of a job, and opens its notebook for that if need be. */
export class Navigation {
  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly tracker: INotebookTracker
  ) {
    this.pending = new PendingNavigations(localStorage, app.serviceManager.serverSettings.baseUrl);
    tracker.widgetAdded.connect((_, panel) => void this.arrived(panel));
    tracker.forEach(panel => void this.arrived(panel));
  }

  /** Its notebook may open in a page of its own, which then shows the cell. */
  async goTo(job: Job): Promise<void> {
    if (!job.cell_id) {
      throw new Error(`#${job.id} comes from no cell of a notebook.`);
    }
    const panel = this.panelOf(job) ?? (await this.opened(job, job.cell_id));
    if (panel && !(await this.show(panel, job.cell_id))) {
      throw new Error(`The cell of #${job.id} is not in ${panel.context.path} any more.`);
    }
  }

  /** Whether the cell is there to be shown. */
  private async show(panel: NotebookPanel, cell: string): Promise<boolean> {
    this.app.shell.activateById(panel.id);
    await panel.revealed;
    const at = panel.content.widgets.findIndex(each => each.model.id === cell);
    if (at < 0) {
      return false;
    }
    panel.content.deselectAll();
    panel.content.activeCellIndex = at;
    await panel.content.scrollToItem(at, 'center');
    panel.content.activate();
    return true;
  }

  /** A notebook was opened, maybe for one of its cells. */
  private async arrived(panel: NotebookPanel): Promise<void> {
    await panel.context.ready;
    const cell = this.pending.take(panel.context.localPath, Date.now());
    if (cell !== null) {
      await this.show(panel, cell);
    }
  }

  private panelOf(job: Job): NotebookPanel | undefined {
    return this.tracker.find(
      each => each.sessionContext.session?.kernel?.id === job.session?.kernel
    );
  }

  private async opened(job: Job, cell: string): Promise<NotebookPanel | null> {
    const { sessions } = this.app.serviceManager;
    await sessions.refreshRunning();
    for (const each of sessions.running()) {
      if (job.session?.kernel && each.kernel?.id === job.session.kernel) {
        this.pending.leave(each.path, cell, Date.now());
        const opened: unknown = await this.app.commands.execute('docmanager:open', {
          path: each.path
        });
        return opened && typeof opened === 'object' && 'sessionContext' in opened
          ? (opened as NotebookPanel)
          : null;
      }
    }
    throw new Error(`#${job.id} belongs to no notebook that this server has open.`);
  }

  private readonly pending: PendingNavigations;
}
