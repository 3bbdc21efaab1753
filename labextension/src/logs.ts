// The output of a job in a tab of the main area: with its colours, searched, followed, copied, saved.

import { Clipboard, MainAreaWidget, ToolbarButton } from '@jupyterlab/apputils';
import { type IRenderMimeRegistry, MimeModel } from '@jupyterlab/rendermime';
import { Widget } from '@lumino/widgets';
import { copyIcon, downloadIcon } from '@jupyterlab/ui-components';

import type { Connection } from './connection';
import { icon } from './icon';
import { type Found, matches } from './matches.js';
import type { Job } from './types';
import { type Part, plainText, printable } from './view/index.js';

const MIME = 'application/vnd.jupyter.stdout';
const FOLLOW = 1000; // milliseconds between two questions
const MOST = 200_000; // characters that are drawn, from the end
const [FOUND, HERE] = ['gpunb-found', 'gpunb-here'];

/** A tab with the log of a job. */
export function logTab(connection: Connection, rendermime: IRenderMimeRegistry, job: Job): MainAreaWidget<LogView> {
  const content = new LogView(connection, rendermime, job);
  const tab = new MainAreaWidget({ content });
  tab.id = tabOf(job);
  tab.title.label = printable(`#${job.id} ${job.name}`);
  tab.title.caption = printable(`The output of #${job.id} ${job.name}`);
  tab.title.icon = icon;
  for (const [name, item] of content.tools) {
    tab.toolbar.addItem(name, item);
  }
  return tab;
}

/** The name of a job's tab. */
export function tabOf(job: Job): string {
  return `gpunb-log-${job.key ?? job.id}`;
}

export class LogView extends Widget {
  constructor(
    private readonly connection: Connection,
    private readonly rendermime: IRenderMimeRegistry,
    private readonly job: Job
  ) {
    super();
    this.addClass('gpunb-log');
    this.box.className = 'gpunb-log-text';
    this.box.tabIndex = 0;
    this.box.setAttribute('role', 'log');
    this.box.setAttribute('aria-live', 'off');
    this.box.setAttribute('aria-label', printable(`Output of #${job.id} ${job.name}`));
    this.note.className = 'gpunb-log-note';
    this.note.setAttribute('role', 'status');
    this.node.append(this.note, this.box);
    this.search.type = 'search';
    this.search.placeholder = 'Search';
    this.search.setAttribute('aria-label', 'Search the output');
    this.search.className = 'gpunb-log-search';
    this.search.addEventListener('input', () => this.find(0));
    this.search.addEventListener('keydown', event => {
      if (event.key === 'Enter') {
        this.find(this.at + (event.shiftKey ? -1 : 1));
      }
    });
    this.follow.type = 'checkbox';
    this.follow.checked = true;
    this.follow.addEventListener('change', () => void this.read());
  }

  /** What the toolbar has. */
  get tools(): [string, Widget][] {
    const search = new Widget();
    this.count.className = 'gpunb-log-count';
    this.count.setAttribute('role', 'status');
    search.node.append(this.search, this.count);
    const follow = new Widget({ node: document.createElement('label') });
    follow.node.className = 'gpunb-log-follow';
    follow.node.append(this.follow, 'Follow');
    const copy = new ToolbarButton({
      icon: copyIcon,
      tooltip: 'Copy the output',
      onClick: () => Clipboard.copyToSystem(plainText(this.text))
    });
    const save = new ToolbarButton({
      icon: downloadIcon,
      tooltip: 'Download the output',
      onClick: () => this.save()
    });
    return [['search', search], ['follow', follow], ['copy', copy], ['download', save]];
  }

  override dispose(): void {
    clearTimeout(this.timer);
    this.mark([]);
    super.dispose();
  }

  protected override onAfterShow(): void {
    void this.read();
  }

  protected override onAfterAttach(): void {
    void this.read();
  }

  /** Ask for what is new, and again a while later as long as the job runs and somebody looks. */
  private async read(): Promise<void> {
    clearTimeout(this.timer);
    if (this.reading || this.isDisposed) {
      return;
    }
    this.reading = true;
    let again = this.isVisible && this.follow.checked;
    try {
      const asked = { position: this.position };
      const part = (await this.connection.request('logs', this.job.key ?? '', asked)) as Part;
      this.note.textContent = part.truncated || this.cut ? 'The beginning is left out.' : '';
      this.position = part.position;
      again &&= part.state === 'running' || part.state === 'queued';
      if (part.text || !this.text) {
        await this.add(part.text);
      }
    } catch (error) {
      this.note.textContent = printable((error as Error).message);
    } finally {
      this.reading = false;
    }
    if (again) {
      this.timer = window.setTimeout(() => void this.read(), FOLLOW);
    }
  }

  private async add(more: string): Promise<void> {
    const text = this.text + more;
    this.cut ||= text.length > MOST;
    this.text = text.slice(-MOST);
    const renderer = this.rendermime.createRenderer(MIME);
    await renderer.renderModel(new MimeModel({ data: { [MIME]: this.text || 'nothing yet' } }));
    this.box.replaceChildren(renderer.node);
    this.find(this.at, false);
    if (this.follow.checked) {
      this.box.scrollTop = this.box.scrollHeight;
    }
  }

  /** Mark all that is searched for, and go to one of it. */
  private find(at: number, go = true): void {
    const found = matches(this.box, this.search.value);
    this.at = found.length ? (at + found.length) % found.length : 0;
    this.count.textContent = !this.search.value
      ? ''
      : found.length
        ? `${this.at + 1} of ${found.length}`
        : 'not found';
    this.mark(found);
    const here = found[this.at];
    if (here && go) {
      this.follow.checked = false;
      const [box, place] = [this.box.getBoundingClientRect(), here.getBoundingClientRect()];
      this.box.scrollTop += place.top - box.top - box.height / 2;
    }
  }

  private mark(found: Found): void {
    if ('highlights' in CSS) {
      CSS.highlights.set(FOUND, new Highlight(...found));
      CSS.highlights.set(HERE, new Highlight(...found.slice(this.at, this.at + 1)));
    }
  }

  private save(): void {
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([this.text], { type: 'text/plain' }));
    link.download = `${this.job.id}-${this.job.name.replace(/[^\w.-]+/g, '_')}.log`;
    link.click();
    URL.revokeObjectURL(link.href);
  }

  private readonly box = document.createElement('div');
  private readonly note = document.createElement('p');
  private readonly search = document.createElement('input');
  private readonly count = document.createElement('span');
  private readonly follow = document.createElement('input');
  private text = '';
  private position = 0;
  private cut = false;
  private reading = false;
  private timer = 0;
  private at = 0;
}
