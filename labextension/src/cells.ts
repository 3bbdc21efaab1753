// GPU cells: "Run cell on GPU…" makes the active cell one and runs it; "Insert GPU cell" adds one.

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { type INotebookTracker, NotebookActions } from '@jupyterlab/notebook';
import { Widget } from '@lumino/widgets';

import { problemOf, shareOf, withShare } from './share';
import type { Snapshot } from './types';
import { deviceText, drawShares, shareText } from './view/index.js';

let last = '1';

/** Ask for the share of the active cell, write it into its first line, and run it. */
export async function runOnGpu(tracker: INotebookTracker, snapshot: Snapshot): Promise<void> {
  const panel = tracker.currentWidget;
  const cell = panel?.content.activeCell;
  if (!panel || !cell || cell.model.type !== 'code') {
    return;
  }
  const source = cell.model.sharedModel.getSource();
  const asked = await showDialog({
    title: 'Run cell on GPU',
    body: new ShareQuestion(shareOf(source) ?? last, snapshot),
    buttons: [Dialog.cancelButton(), Dialog.okButton({ label: 'Run' })],
    focusNodeSelector: 'input'
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
  cell.model.sharedModel.setSource(withShare(source, share));
  const kernel = panel.sessionContext.session?.kernel;
  // Loading it again does nothing, and prints nothing.
  const load = `get_ipython().extension_manager.load_extension('gpunb')`;
  kernel?.requestExecute({ code: load, silent: true, store_history: false, stop_on_error: false });
  await NotebookActions.run(panel.content, panel.sessionContext);
}

/** Add a GPU cell below the active one, after the line that loads gpunb. */
export function insertGpuCell(tracker: INotebookTracker): void {
  const panel = tracker.currentWidget;
  if (!panel) {
    Notification.info('Open a notebook first: the cell goes into it.', { autoClose: 6000 });
    return;
  }
  for (const source of ['%load_ext gpunb', '%%gpu 0.5\n']) {
    NotebookActions.insertBelow(panel.content);
    panel.content.activeCell?.model.sharedModel.setSource(source);
  }
  panel.content.mode = 'edit';
  panel.activate();
}

/** Asks for a share, beside what is free now. */
class ShareQuestion extends Widget implements Dialog.IBodyWidget<string> {
  constructor(share: string, snapshot: Snapshot) {
    super();
    this.addClass('gpunb-share');
    const label = document.createElement('label');
    label.textContent =
      'Share of a GPU (0.5), number of GPUs (2), memory (10GiB), ' +
      'or auto for what earlier runs of this cell took';
    this.field.value = share;
    this.field.className = 'jp-mod-styled';
    label.append(this.field);
    const choices = document.createElement('div');
    choices.className = 'gpunb-choices';
    const devices = snapshot.devices ?? [];
    const all = String(Math.max(1, devices.length));
    for (const each of new Set(['0.25', '0.5', '1', all, 'auto'])) {
      const button = document.createElement('button');
      button.type = 'button';
      button.textContent = each;
      button.addEventListener('click', () => {
        this.field.value = each;
        this.field.focus();
      });
      choices.append(button);
    }
    const free = document.createElement('ul');
    free.setAttribute('aria-label', 'What is free');
    for (const device of devices) {
      const [row, name, bar, text] = ['li', 'span', 'span', 'span'].map(tag =>
        document.createElement(tag)
      ) as [HTMLElement, HTMLElement, HTMLElement, HTMLElement];
      name.textContent = deviceText(device);
      drawShares(bar, device, snapshot);
      text.textContent = `${shareText(device.free)} free`;
      row.append(name, bar, text);
      free.append(row);
    }
    this.node.append(label, choices, free);
  }

  getValue(): string {
    return this.field.value;
  }

  private readonly field = document.createElement('input');
}
