// What stands on a cell while its job runs or waits, with a button that stops it.

import type { Cell } from '@jupyterlab/cells';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

import type { Connection } from './connection';
import { duration, isCell } from './endings.js';
import { keyOf } from './merge.js';
import type { State } from './state';
import type { Group, Job, Snapshot } from './types';
import { Calm, devicesText, printable, statesText } from './view/index.js';

interface Shown {
  readonly element: HTMLElement;
  readonly text: HTMLElement;
  readonly time: HTMLElement;
  readonly stop: HTMLButtonElement;
  key: string;
  seconds: number;
  since: number;
}

type Found = [string, Job, Group | undefined];

/** The jobs of a kernel's cells that are not over, by the cell's id; the first one of each, with the
 * sweep of which it is a trial. The key is that of the sweep, if there is one. */
export function jobsByCell(state: State, kernel: string): Map<string, Found> {
  const found = new Map<string, Found>();
  for (const [pid, snapshot] of state.sessions) {
    for (const job of cellsOf(snapshot)) {
      const whose = job.client ?? snapshot.session;
      if (whose?.kernel === kernel && job.cell_id && !found.has(job.cell_id)) {
        const sweep = snapshot.groups?.find(
          each => each.id === job.part_of && each.kind === 'sweep'
        );
        found.set(job.cell_id, [keyOf(pid, sweep?.id ?? job.id), job, sweep]);
      }
    }
  }
  return found;
}

function cellsOf(snapshot: Snapshot): Job[] {
  return [...(snapshot.running ?? []), ...(snapshot.waiting ?? [])].filter(isCell);
}

export class Badges {
  constructor(
    private readonly tracker: INotebookTracker,
    private readonly connection: Connection,
    private readonly stop: (key: string) => Promise<void>
  ) {
    connection.changed.connect(this.draw, this);
    tracker.widgetAdded.connect((_, panel) => this.follow(panel));
    tracker.forEach(panel => this.follow(panel));
  }

  set enabled(enabled: boolean) {
    this._enabled = enabled;
    this.draw();
  }

  private follow(panel: NotebookPanel): void {
    panel.sessionContext.kernelChanged.connect(this.draw, this);
    void panel.revealed.then(() => this.draw());
    panel.content.modelContentChanged?.connect(this.draw, this);
  }

  private draw(): void {
    this.calm.draw(() => this.redraw());
  }

  private redraw(): void {
    const live = new Set<string>();
    this.tracker.forEach(panel => {
      const kernel = panel.sessionContext.session?.kernel?.id;
      if (!this._enabled || !kernel) {
        return;
      }
      const jobs = jobsByCell(this.connection.state, kernel);
      if (!jobs.size) {
        return;
      }
      for (const cell of panel.content.widgets) {
        const found = jobs.get(cell.model.id);
        if (found) {
          live.add(cell.model.id);
          this.show(cell, ...found);
        }
      }
    });
    for (const [id, shown] of this.shown) {
      if (!live.has(id)) {
        shown.element.remove();
        this.shown.delete(id);
      }
    }
    this.tick();
  }

  private show(cell: Cell, key: string, job: Job, sweep: Group | undefined): void {
    let shown = this.shown.get(cell.model.id);
    if (!shown) {
      shown = this.make();
      this.shown.set(cell.model.id, shown);
    }
    const place = cell.inputArea?.node ?? cell.node;
    if (shown.element.parentElement !== place) {
      place.append(shown.element);
    }
    const { at } = this.connection.state;
    const running = job.state === 'running' || sweep !== undefined;
    const name = sweep ? `sweep of ${sweep.name}` : `#${job.id} ${job.name}`;
    const where = sweep ? statesText(sweep.states ?? {}) : `#${job.id} on ${devicesText(job)}`;
    const text = running ? where : `#${job.id} waits`;
    const title = running ? `${name}: ${text}` : `${job.name} ${job.waits_for ?? 'waits'}`;
    shown.key = key;
    shown.seconds = sweep ? at - (sweep.began ?? at) : job.seconds;
    shown.since = at;
    shown.element.classList.toggle('gpunb-waits', !running);
    shown.element.title = printable(title);
    setText(shown.text, running ? text : `${text}: ${job.waits_for ?? 'next in line'}`);
    const label = `${running ? 'Stop' : 'Cancel'} ${name}`;
    shown.stop.setAttribute('aria-label', printable(label));
    setText(shown.stop, running ? 'Stop' : 'Cancel');
  }

  private make(): Shown {
    const element = document.createElement('div');
    element.className = 'gpunb-badge';
    const text = document.createElement('span');
    text.className = 'gpunb-badge-text';
    const time = document.createElement('span');
    time.className = 'gpunb-badge-time';
    const stop = document.createElement('button');
    stop.type = 'button';
    stop.className = 'gpunb-badge-stop';
    // the notebook would take the cell out of its editor, or select it
    for (const kind of ['mousedown', 'keydown']) {
      stop.addEventListener(kind, event => event.stopPropagation());
    }
    element.append(text, time, stop);
    const shown = { element, text, time, stop, key: '', seconds: 0, since: 0 };
    stop.addEventListener('click', () => void this.stop(shown.key));
    this.calm.watch(element);
    return shown;
  }

  private tick(): void {
    clearTimeout(this.timer);
    if (!this.shown.size || document.hidden) {
      return;
    }
    for (const shown of this.shown.values()) {
      const seconds = shown.seconds + Math.max(0, this.connection.clock.now() - shown.since);
      setText(shown.time, duration(Math.floor(seconds)).replace('.0', ''));
    }
    this.timer = window.setTimeout(() => (this.calm.pressed ? this.draw() : this.tick()), 1000);
  }

  private _enabled = true;
  private timer = 0;
  private readonly calm = new Calm();
  private readonly shown = new Map<string, Shown>();
}

function setText(element: HTMLElement, said: string): void {
  const text = printable(said);
  if (element.textContent !== text) {
    element.textContent = text;
  }
}
