// What is known of the machine, kept up to date by the news from the server. Pure.

import type { Machine, News, Snapshot } from './types';
import { gpuRate } from './view/index.js';

export interface State {
  readonly sessions: ReadonlyMap<number, Snapshot>;
  readonly machine: Machine;
  /** The moment that it shows, in seconds since 1970 on the server's clock. */
  readonly at: number;
}

export const NOTHING: State = { sessions: new Map(), machine: {}, at: 0 };

/** The state after some news that the server sent at a moment of its clock. */
export function after(state: State, news: News, at: number): State {
  const sessions = new Map(news.whole ? [] : state.sessions);
  for (const pid of news.gone) {
    sessions.delete(pid);
  }
  for (const [pid, parts] of Object.entries(news.sessions)) {
    const time = parts.time ?? at;
    const known = sessions.get(Number(pid));
    sessions.set(Number(pid), { ...(known && older(known, time)), ...parts, time });
  }
  for (const [pid, each] of sessions) {
    sessions.set(pid, older(each, at));
  }
  const machine = news.machine ?? (news.whole ? {} : state.machine);
  return { sessions, machine, at };
}

/** A session in which nothing has happened until a moment but that time has passed. */
function older(snapshot: Snapshot, at: number): Snapshot {
  const passed = Math.max(0, at - (snapshot.time ?? at));
  const aged = <Each extends { seconds?: number | null }>(list: Each[]): Each[] =>
    list.map(each =>
      typeof each.seconds === 'number' ? { ...each, seconds: each.seconds + passed } : each
    );
  const { running, waiting, actors, totals } = snapshot;
  return {
    ...snapshot,
    time: at,
    ...(running && { running: aged(running) }),
    ...(waiting && { waiting: aged(waiting) }),
    ...(actors && { actors: aged(actors) }),
    ...(totals && {
      totals: { ...totals, gpu_seconds: totals.gpu_seconds + passed * gpuRate(snapshot) }
    })
  };
}
