// The connection to the server extension: what it says, and what it is asked to do.

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { type ISignal, Signal } from '@lumino/signaling';

import { merge, partsOf } from './merge';
import { NOTHING, type State, after } from './state';
import { CONNECTING, type Problem, problemOf } from './summary';
import type { News, Snapshot } from './types';
import { Clock } from './view/index.js';

const FIRST_WAIT = 500;
const LONGEST_WAIT = 15000;
/** Milliseconds that a page may be hidden before it stops listening. */
const HIDDEN = 30000;

/** Listens while the page can be seen; connects again when it is cut off. */
export class Connection {
  constructor(private readonly settings: ServerConnection.ISettings) {
    document.addEventListener('visibilitychange', this.onVisibility);
  }

  /** The server's clock, which is that of all its kernels. */
  readonly clock = new Clock();

  /** What is known; old if there is a problem. */
  get state(): State {
    return this._state;
  }

  /** The same as one snapshot. */
  get snapshot(): Snapshot {
    return (this._snapshot ??= merge(this._state));
  }

  /** Why what is known may be old, or is not known at all. */
  get problem(): Problem | null {
    return this._problem;
  }

  /** Either has changed; with the state before. */
  get changed(): ISignal<this, State> {
    return this._changed;
  }

  /** Seconds between two messages at least. */
  set interval(seconds: number) {
    if (seconds !== this._interval) {
      this._interval = seconds;
      if (this.socket) {
        this.close();
        this.open();
      }
    }
  }

  /** Start to listen. */
  open(): void {
    clearTimeout(this.timer);
    this.clock.ask();
    const { WebSocket, wsUrl, token, appendToken } = this.settings;
    const url =
      URLExt.join(wsUrl, 'gpunb/api/changes') +
      URLExt.objectToQueryString({
        interval: this._interval,
        ...(appendToken && token ? { token } : {})
      });
    const socket = new WebSocket(url);
    this.socket = socket;
    socket.onmessage = event => {
      if (socket === this.socket) {
        this.wait = FIRST_WAIT;
        this.hear(JSON.parse(event.data as string) as News);
      }
    };
    socket.onclose = () => {
      if (socket === this.socket) {
        this.socket = null;
        void this.lost();
      }
    };
  }

  /** Ask the session of a job, an actor or a sweep to do something with it. */
  async request(what: string, key: string, more: Record<string, unknown> = {}): Promise<unknown> {
    const { pid, id } = partsOf(key);
    const url = URLExt.join(this.settings.baseUrl, 'gpunb/api/sessions', `${pid}`, what);
    const field = { kill: 'actor', stop: 'sweep' }[what] ?? 'job';
    const body = JSON.stringify({ [field]: id, ...more });
    let answer: Response;
    try {
      answer = await ServerConnection.makeRequest(url, { method: 'POST', body }, this.settings);
    } catch {
      throw new Error(problemOf(0).reason);
    }
    const said = (await answer.json().catch(() => ({}))) as { value?: unknown; message?: string };
    if (!answer.ok) {
      const { reason, advice } = problemOf(answer.status);
      throw new Error(said.message ?? `${reason} ${advice}`);
    }
    return said.value;
  }

  /** Listen no more. */
  close(): void {
    clearTimeout(this.timer);
    const socket = this.socket;
    this.socket = null;
    socket?.close();
  }

  private hear(news: News): void {
    const { time } = news;
    if (this.clock.jumped()) {
      // The page slept, and so may the news have done on its way: ask for all of it again.
      this.clock.reset();
      this.close();
      this.open();
    } else {
      this.clock.hear(time);
      this.set(after(this._state, news, time), null);
    }
  }

  private set(state: State, problem: Problem | null): void {
    const before = this._state;
    if (state !== before) {
      this._state = state;
      this._snapshot = null;
    }
    this._problem = problem;
    this._changed.emit(before);
  }

  /** Find out why the socket closed, which a browser does not tell, and try again later. */
  private async lost(): Promise<void> {
    const url = URLExt.join(this.settings.baseUrl, 'gpunb/api/machine');
    let problem = problemOf(0);
    try {
      const answer = await ServerConnection.makeRequest(url, {}, this.settings);
      if (answer.ok) {
        this.hear((await answer.json()) as News);
        problem = {
          reason: 'Changes do not arrive: the connection to the Jupyter server was cut.',
          advice: 'If it stays so, a proxy before the server may not let websockets pass.'
        };
      } else {
        problem = problemOf(answer.status, answer.statusText);
      }
    } catch {
      // no answer at all
    }
    if (this.socket === null && !document.hidden) {
      this.set(this._state, problem);
      this.timer = window.setTimeout(() => this.open(), this.wait);
      this.wait = Math.min(LONGEST_WAIT, this.wait * 2);
    }
  }

  private readonly onVisibility = (): void => {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = window.setTimeout(() => this.close(), HIDDEN);
    } else if (this.socket === null) {
      this.wait = FIRST_WAIT;
      this.open();
    }
  };

  private _state: State = NOTHING;
  private _snapshot: Snapshot | null = null;
  private _problem: Problem | null = CONNECTING;
  private _interval = 0.25;
  private readonly _changed = new Signal<this, State>(this);
  private socket: WebSocket | null = null;
  private wait = FIRST_WAIT;
  private timer = 0;
  private hiding = 0;
}
