// From a job to its cell.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

import type { Job } from './types';

/** Shows the cell of a job, and opens its notebook for that if need be. */
export class Navigation {
  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly tracker: INotebookTracker
  ) {}

  async goTo(job: Job): Promise<void> {
    if (!job.cell_id) {
      throw new Error(`#${job.id} comes from no cell of a notebook.`);
    }
    const panel = this.panelOf(job) ?? (await this.opened(job));
    this.app.shell.activateById(panel.id);
    await panel.revealed;
    const cells = panel.content.widgets;
    const at = cells.findIndex(each => each.model.id === job.cell_id);
    if (at < 0) {
      throw new Error(`The cell of #${job.id} is not in ${panel.context.path} any more.`);
    }
    panel.content.deselectAll();
    panel.content.activeCellIndex = at;
    await panel.content.scrollToItem(at, 'center');
    panel.content.activate();
  }

  private panelOf(job: Job): NotebookPanel | undefined {
    return this.tracker.find(
      each => each.sessionContext.session?.kernel?.id === job.session?.kernel
    );
  }

  private async opened(job: Job): Promise<NotebookPanel> {
    const { sessions } = this.app.serviceManager;
    await sessions.refreshRunning();
    for (const each of sessions.running()) {
      if (job.session?.kernel && each.kernel?.id === job.session.kernel) {
        const opened: unknown = await this.app.commands.execute('docmanager:open', {
          path: each.path
        });
        if (opened && typeof opened === 'object' && 'sessionContext' in opened) {
          return opened as NotebookPanel;
        }
        throw new Error(`${each.path} opens in a page of its own.`);
      }
    }
    throw new Error(`#${job.id} belongs to no notebook that this server has open.`);
  }
}
