// The item in the status bar: how much is in use, and how many jobs wait.

import { Widget } from '@lumino/widgets';

import type { Connection } from './connection';
import { lackOf, statusText } from './summary';

export class StatusItem extends Widget {
  constructor(
    private readonly connection: Connection,
    open: () => void
  ) {
    super({ node: document.createElement('button') });
    this.addClass('gpunb-status');
    (this.node as HTMLButtonElement).type = 'button';
    this.node.addEventListener('click', open);
    connection.changed.connect(this.draw, this);
    this.draw();
  }

  override dispose(): void {
    this.connection.changed.disconnect(this.draw, this);
    super.dispose();
  }

  private draw(): void {
    const { state, snapshot, problem } = this.connection;
    const known = problem === null && Boolean(snapshot.devices?.length);
    const text = known ? statusText(snapshot) : 'GPU ?';
    if (this.node.textContent !== text) {
      this.node.textContent = text;
    }
    const lack = problem ?? lackOf(state);
    const title = lack ? `${lack.reason} ${lack.advice}`.trim() : 'Share of the GPUs in use';
    if (this.node.title !== title) {
      this.node.title = title;
      this.node.setAttribute('aria-label', `${text}. ${title}. Opens the GPU panel.`);
    }
  }
}
