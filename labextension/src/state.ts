// What is known of the machine, kept up to date by the news from the server. Pure.

import type { Machine, News, Snapshot } from './types';

export interface State {
  readonly sessions: ReadonlyMap<number, Snapshot>;
  readonly machine: Machine;
  /** The moment that it shows, in seconds on the page's own clock. */
  readonly at: number;
}

export const NOTHING: State = { sessions: new Map(), machine: {}, at: 0 };

/** The state after some news that came in at a moment. */
export function after(state: State, news: News, at: number): State {
  const sessions = new Map<number, Snapshot>();
  for (const [pid, each] of news.whole ? [] : state.sessions) {
    sessions.set(pid, older(each, at - state.at));
  }
  for (const pid of news.gone) {
    sessions.delete(pid);
  }
  for (const [pid, parts] of Object.entries(news.sessions)) {
    sessions.set(Number(pid), { ...sessions.get(Number(pid)), ...parts });
  }
  const machine = news.machine ?? (news.whole ? {} : state.machine);
  return { sessions, machine, at };
}

/** A session in which nothing has happened but that time has passed. */
function older(snapshot: Snapshot, passed: number): Snapshot {
  const aged = <Each extends { seconds?: number | null }>(list: Each[]): Each[] =>
    list.map(each =>
      typeof each.seconds === 'number' ? { ...each, seconds: each.seconds + passed } : each
    );
  const now: Snapshot = { ...snapshot };
  if (snapshot.time !== undefined) {
    now.time = snapshot.time + passed;
  }
  if (snapshot.running) {
    now.running = aged(snapshot.running);
  }
  if (snapshot.waiting) {
    now.waiting = aged(snapshot.waiting);
  }
  if (snapshot.actors) {
    now.actors = aged(snapshot.actors);
  }
  return now;
}
