// "Run cell on GPU…": from a cell to a GPU cell that runs.

import { InputDialog, Notification } from '@jupyterlab/apputils';
import { type INotebookTracker, NotebookActions } from '@jupyterlab/notebook';

import { problemOf, shareOf, withShare } from './share';

let last = '1';

/** Ask for the share of the active cell, write it into its first line, and run it. */
export async function runOnGpu(tracker: INotebookTracker): Promise<void> {
  const panel = tracker.currentWidget;
  const cell = panel?.content.activeCell;
  if (!panel || !cell || cell.model.type !== 'code') {
    return;
  }
  const source = cell.model.sharedModel.getSource();
  const asked = await InputDialog.getText({
    title: 'Run cell on GPU',
    label: 'Share of a GPU (0.5), number of GPUs (2), or memory (10GiB)',
    text: shareOf(source) ?? last,
    okLabel: 'Run'
  });
  if (!asked.button.accept) {
    return;
  }
  const share = (asked.value ?? '').trim();
  const problem = problemOf(share);
  if (problem) {
    Notification.error(problem, { autoClose: 8000 });
    return;
  }
  last = share;
  cell.model.sharedModel.setSource(withShare(source, share.replace(/\s+/g, '')));
  const kernel = panel.sessionContext.session?.kernel;
  // Loading it again does nothing, and prints nothing.
  const load = `get_ipython().extension_manager.load_extension('gpunb')`;
  kernel?.requestExecute({ code: load, silent: true, store_history: false, stop_on_error: false });
  await NotebookActions.run(panel.content, panel.sessionContext);
}
