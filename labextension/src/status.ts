// The item in the status bar: who has how much of each device, how many jobs wait and have failed.

import { Widget } from '@lumino/widgets';

import type { Connection } from './connection';
import { lackOf, statusText } from './summary';
import { type Memory, drawShares, failures } from './view/index.js';

/** Devices that are drawn; the text counts all. */
const DRAWN = 8;

export class StatusItem extends Widget {
  constructor(
    private readonly connection: Connection,
    private readonly memory: Memory,
    open: () => void
  ) {
    super({ node: document.createElement('button') });
    this.addClass('gpunb-status');
    (this.node as HTMLButtonElement).type = 'button';
    this.bars.className = 'gpunb-bars';
    this.failed.className = 'gpunb-failed';
    this.node.append(this.bars, this.text, this.failed);
    this.node.addEventListener('click', open);
    connection.changed.connect(this.draw, this);
    this.draw();
  }

  override dispose(): void {
    this.connection.changed.disconnect(this.draw, this);
    super.dispose();
  }

  /** Draw what has changed, of the machine or of the failures that were seen. */
  draw(): void {
    const { state, snapshot, problem } = this.connection;
    const known = problem === null && Boolean(snapshot.devices?.length);
    const devices = known ? (snapshot.devices ?? []).slice(0, DRAWN) : [];
    while (this.bars.children.length > devices.length) {
      this.bars.lastElementChild?.remove();
    }
    for (const [at, device] of devices.entries()) {
      const bar = this.bars.children[at] ?? this.bars.appendChild(document.createElement('span'));
      drawShares(bar as HTMLElement, device, snapshot);
    }
    const failed = known ? failures(snapshot, this.memory).length : 0;
    const text = known ? statusText(snapshot) : 'GPU ?';
    const marked = failed ? `✗ ${failed} failed` : '';
    set(this.text, text);
    set(this.failed, marked);
    const lack = problem ?? lackOf(state);
    const title = lack ? `${lack.reason} ${lack.advice}`.trim() : 'Share of the GPUs in use';
    const label = [text, marked, title].filter(Boolean).join('. ');
    if (this.node.getAttribute('aria-label') !== `${label}. Opens the GPU panel.`) {
      this.node.title = title;
      this.node.setAttribute('aria-label', `${label}. Opens the GPU panel.`);
    }
  }

  private readonly bars = document.createElement('span');
  private readonly text = document.createElement('span');
  private readonly failed = document.createElement('span');
}

function set(element: HTMLElement, text: string): void {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}
