// One snapshot of all sessions, for the machine's view. Pure.

import type { State } from './state';
import type { Actor, Device, Group, Job, Session, Snapshot } from './types';
import { isPrivate } from './view/index.js';

/** The key of a job or actor among those of all sessions. */
export function keyOf(pid: number, id: number | string): string {
  return `${pid}:${id}`;
}

/** The session, and the number of a job or the id of a sweep, that a key stands for. */
export function partsOf(key: string): { pid: number; id: number | string } {
  const [pid, id] = key.split(':');
  if (!pid || !id || Number.isNaN(Number(pid))) {
    throw new Error(`${JSON.stringify(key)} names no job`);
  }
  return { pid: Number(pid), id: Number.isNaN(Number(id)) ? id : Number(id) };
}

/** Whether a key stands for a sweep. */
export function isSweep(key: string): boolean {
  return typeof partsOf(key).id === 'string';
}

/** What a notebook is called where it is one of several. */
export function nameOf(session: Session): string {
  const file = session.notebook?.split('/').pop();
  if (file) {
    return file.replace(/\.ipynb$/, '');
  }
  return session.head ? `head process ${session.head}` : `process ${session.pid}`;
}

/** All sessions as one; without sessions, what the server knows of the machine. */
export function merge(state: State): Snapshot {
  const sessions = [...state.sessions.entries()].sort(([one], [other]) => one - other);
  const several = sessions.length > 1;
  const all: Required<Pick<Snapshot, 'running' | 'waiting' | 'finished' | 'actors'>> = {
    running: [],
    waiting: [],
    finished: [],
    actors: []
  };
  const groups: Group[] = [];
  const counts = { running: 0, waiting: 0, finished: 0, actors: 0 };
  const devices = new Map<string, Device>();
  const warnings = new Set<string>();
  const totals = { gpu_seconds: 0, peak: null as number | null };
  let time = 0;
  for (const [pid, each] of sessions) {
    const session = each.session ?? { pid };
    const own = <What extends Job | Actor>(list: What[] | undefined): What[] =>
      (list ?? []).map(what => {
        const whose = what.client ?? session;
        const owner = several || what.client ? { owner: nameOf(whose) } : {};
        const group = what.part_of ? { part_of: keyOf(pid, what.part_of) } : {};
        return { ...what, session: whose, key: keyOf(pid, what.id), ...owner, ...group };
      });
    all.running.push(...own(each.running));
    all.waiting.push(...own(each.waiting));
    all.finished.push(...own(each.finished));
    all.actors.push(...own(each.actors));
    for (const group of each.groups ?? []) {
      const actor = group.actor == null ? null : keyOf(pid, group.actor);
      groups.push({ ...group, key: keyOf(pid, group.id), actor });
    }
    counts.running += each.counts?.running ?? each.running?.length ?? 0;
    counts.waiting += each.counts?.waiting ?? each.queued ?? 0;
    counts.finished += each.counts?.finished ?? each.finished?.length ?? 0;
    counts.actors += each.counts?.actors ?? each.actors?.length ?? 0;
    time = Math.max(time, each.time ?? 0);
    totals.gpu_seconds += each.totals?.gpu_seconds ?? 0;
    if (each.totals?.peak) {
      totals.peak = Math.max(totals.peak ?? 0, each.totals.peak);
    }
    for (const text of each.warnings ?? []) {
      warnings.add(several ? `${nameOf(session)}: ${text}` : text);
    }
    for (const device of each.devices ?? []) {
      add(devices, device, pid, several ? nameOf(session) : '');
    }
  }
  const known = [...devices.values()].map(device => without(device, state.sessions));
  return {
    ...(time ? { time } : {}),
    devices: sessions.length ? known : state.machine.devices ?? [],
    ...all,
    groups,
    counts,
    queued: counts.waiting,
    totals,
    warnings: [...warnings]
  };
}

/** Add a session's picture of a device. Devices that exist in its books only are its own. */
function add(devices: Map<string, Device>, device: Device, pid: number, owner: string): void {
  const key = isPrivate(device) ? keyOf(pid, device.key) : device.key;
  const held = device.held.map(([id, share]): [string, number] => [keyOf(pid, id), share]);
  const before = devices.get(key);
  if (before) {
    const free = Math.min(before.free, device.free);
    devices.set(key, { ...before, free, held: [...before.held, ...held] });
  } else {
    const type = isPrivate(device) && owner ? [device.type, owner].filter(Boolean).join(', ') : device.type;
    devices.set(key, { ...device, key, held, type });
  }
}

/** The device, whose free share is what nobody holds; the sessions that are shown are no others. */
function without(device: Device, sessions: ReadonlyMap<number, Snapshot>): Device {
  const others = isPrivate(device)
    ? device.others
    : device.others.filter(each => !(each.kind === 'kernel' && sessions.has(each.pid)));
  const held = [...device.held.map(([, share]) => share), ...others.map(each => each.share ?? 0)];
  const free = Math.max(0, 1 - held.reduce((sum, share) => sum + share, 0));
  return { ...device, others, free: Math.round(Math.min(device.free, free) * 10000) / 10000 };
}
