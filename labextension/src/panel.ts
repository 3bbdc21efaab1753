// The sidebar: all kernels' work on the devices of the machine.

import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import type { Connection } from './connection';
import { icon } from './icon';
import { CONNECTING, lackOf } from './summary';
import { type Actions, type Memory, type View, render } from './view/index.js';

export const PANEL = 'gpunb-panel';

/** Draws only while it can be seen. */
export class Panel extends Widget {
  constructor(
    private readonly connection: Connection,
    private readonly actions: Actions,
    private readonly memory: Memory,
    insert: () => void
  ) {
    super();
    this.id = PANEL;
    this.title.icon = icon;
    this.title.caption = 'GPUs';
    this.title.label = '';
    this.addClass('gpunb-panel');
    this.node.setAttribute('aria-label', 'GPUs');
    this.node.setAttribute('role', 'complementary');
    this.node.tabIndex = -1;
    this.notice.className = 'gpunb-notice';
    this.notice.setAttribute('role', 'status');
    this.start.type = 'button';
    this.start.className = 'jp-mod-styled';
    this.start.textContent = 'Insert a GPU cell';
    this.start.addEventListener('click', insert);
    this.notice.append(this.reason, this.advice, this.start);
    this.lanes.className = 'gpunb-lanes';
    const heading = document.createElement('div');
    heading.textContent = 'GPUs';
    heading.className = 'gpunb-heading';
    this.node.append(heading, this.notice, this.lanes);
    connection.changed.connect(this.changed, this);
  }

  override dispose(): void {
    this.connection.changed.disconnect(this.changed, this);
    this.view?.dispose();
    super.dispose();
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.draw();
  }

  protected override onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this.view?.dispose(); // its clock too
    this.view = null;
  }

  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    this.node.focus();
  }

  private changed(): void {
    if (this.isVisible) {
      this.draw();
    }
  }

  private draw(): void {
    const { state, problem } = this.connection;
    const { reason, advice } = problem ?? lackOf(state) ?? { reason: '', advice: '' };
    set(this.reason, reason);
    setAdvice(this.advice, advice);
    this.notice.hidden = !reason;
    this.notice.classList.toggle('gpunb-problem', problem !== null && problem !== CONNECTING);
    this.start.hidden = problem !== null || state.sessions.size > 0 || !state.machine.devices?.length;
    this.lanes.classList.toggle('gpunb-old', problem !== null);
    const { snapshot } = this.connection;
    this.lanes.hidden = !snapshot.devices?.length && !state.sessions.size;
    if (this.lanes.hidden) {
      return;
    }
    if (this.view) {
      this.view.update(snapshot);
    } else {
      const busy = 'The session has not answered yet.';
      const { actions, memory } = this;
      const { clock } = this.connection;
      this.view = render(this.lanes, snapshot, { actions, memory, busy, clock });
    }
  }

  private view: View | null = null;
  private readonly notice = document.createElement('div');
  private readonly reason = document.createElement('p');
  private readonly advice = document.createElement('p');
  private readonly start = document.createElement('button');
  private readonly lanes = document.createElement('div');
}

/** Words in quotes are code, to be copied. */
function setAdvice(element: HTMLElement, text: string): void {
  const parts = text.split('"');
  if (element.textContent !== parts.join('')) {
    element.replaceChildren(...parts.map((part, at) => (at % 2 ? code(part) : part)));
  }
}

function code(text: string): HTMLElement {
  const element = document.createElement('code');
  element.textContent = text;
  return element;
}

function set(element: HTMLElement, text: string): void {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}
