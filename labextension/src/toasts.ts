// A word when something that ran in the background is over.

import { Notification } from '@jupyterlab/apputils';

import type { Connection } from './connection';
import { endings, sentence, toneOf } from './endings';
import type { State } from './state';
import type { Job } from './types';
import { printable } from './view/index.js';

export type Wanted = 'all' | 'failures' | 'none';

const MOST = 3; // of one step; the rest is counted

export class Toasts {
  wanted: Wanted = 'all';

  constructor(
    private readonly connection: Connection,
    private readonly goTo: (job: Job) => Promise<void>
  ) {
    connection.changed.connect(this.changed, this);
  }

  private changed(_: Connection, before: State): void {
    if (this.wanted === 'none' || before === this.connection.state) {
      return;
    }
    const all = endings(before, this.connection.state);
    const told = all.filter(
      each => each.what === 'session' || this.wanted === 'all' || each.job.state === 'failed'
    );
    for (const each of told.slice(0, MOST)) {
      const tone = toneOf(each);
      const job = each.what === 'job' ? { ...each.job, session: each.session } : null;
      const show = () => {
        if (job) {
          this.goTo(job).catch((error: Error) => Notification.error(error.message));
        }
      };
      Notification.emit(printable(sentence(each)), tone, {
        autoClose: tone === 'error' ? 15000 : 6000,
        ...(job?.cell_id ? { actions: [{ label: 'Go to cell', callback: show }] } : {})
      });
    }
    if (told.length > MOST) {
      Notification.info(`${told.length - MOST} more jobs have ended`, { autoClose: 6000 });
    }
  }
}
