// Which jobs have ended between two states, for whoever is to be told. Pure.

import { NOTHING, type State } from './state.js';
import type { Job, Session, Snapshot } from './types';

/** A job in the background that is over, or a session that left work behind. */
export type Ending =
  | { readonly what: 'job'; readonly job: Job; readonly session: Session }
  | { readonly what: 'session'; readonly session: Session; readonly lost: number };

/** Seconds for which the end of a job is news in a session that was not known before. */
const RECENT = 30;

/** What ended on the way from one state to the next; nothing if there was none before. */
export function endings(before: State, now: State): Ending[] {
  const found: Ending[] = [];
  for (const [pid, was] of before.sessions) {
    const is = now.sessions.get(pid);
    const session = was.session ?? { pid };
    if (is === undefined) {
      const lost = (was.running?.length ?? 0) + (was.queued ?? was.waiting?.length ?? 0);
      if (lost) {
        found.push({ what: 'session', session, lost });
      }
    } else {
      found.push(...newlyFinished(was, is).map(job => ended(job, session)));
    }
  }
  for (const [pid, is] of before === NOTHING ? [] : now.sessions) {
    if (!before.sessions.has(pid)) {
      const session = is.session ?? { pid };
      const recent = (job: Job) => (is.time ?? 0) - (job.ended ?? 0) < RECENT;
      const recently = newlyFinished({}, is).filter(recent);
      found.push(...recently.map(job => ended(job, session)));
    }
  }
  return found;
}

function ended(job: Job, session: Session): Ending {
  return { what: 'job', job, session: job.client ?? session };
}

function newlyFinished(was: Snapshot, is: Snapshot): Job[] {
  if (was.finished === is.finished) {
    return [];
  }
  const known = new Set(was.finished?.map(job => job.id));
  const ours = (job: Job) => isCell(job) && job.background === true;
  return (is.finished ?? []).filter(job => ours(job) && !known.has(job.id)).reverse();
}

/** Whether a job is a cell, in one process or in several ranks. So is a function in several ranks,
 * but it has no `cell_id` and is not in the background. */
export function isCell(job: Job): boolean {
  return job.kind === 'cell' || job.kind === 'ranks';
}

/** In words, such as "#7 train failed after 3 min: epochs.ipynb". */
export function sentence(ending: Ending): string {
  const file = ending.session.notebook?.split('/').pop() ?? `process ${ending.session.pid}`;
  if (ending.what === 'session') {
    const jobs = ending.lost === 1 ? 'a job' : `${ending.lost} jobs`;
    const who = ending.session.head
      ? `The head process ${ending.session.head}`
      : `The kernel of ${file}`;
    return `${who} has ended, and ${jobs} with it. Their devices are free again.`;
  }
  const { id, name, state, seconds } = ending.job;
  const how = state === 'done' ? 'is done' : state === 'failed' ? 'has failed' : `was ${state}`;
  return `#${id} ${name} ${how} after ${duration(seconds)} (${file})`;
}

/** How it is to be told: what was cancelled is neither a failure nor a success. */
export function toneOf(ending: Ending): 'error' | 'info' | 'success' {
  if (ending.what === 'session' || ending.job.state === 'failed') {
    return 'error';
  }
  return ending.job.state === 'done' ? 'success' : 'info';
}

/** Such as "12 s" or "1:05:00". */
export function duration(seconds: number): string {
  if (seconds < 10) {
    return `${Math.max(0, seconds).toFixed(1)} s`;
  }
  const whole = Math.round(seconds);
  if (whole < 60) {
    return `${whole} s`;
  }
  const two = (value: number) => String(value).padStart(2, '0');
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const rest = two(whole % 60);
  return hours ? `${hours}:${two(minutes)}:${rest}` : `${minutes}:${rest}`;
}
