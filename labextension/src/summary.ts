// The machine in a few words: for the status bar, and where there is nothing to draw. Pure.

import type { Device, Snapshot } from './types';
import type { State } from './state';

/** Why nothing can be shown, or what is missing, and what to do. */
export interface Problem {
  readonly reason: string;
  readonly advice: string;
}

export const CONNECTING: Problem = {
  reason: 'Connecting to the Jupyter server.',
  advice: ''
};

/** From the status of an answer to what is wrong; 0 for none at all. */
export function problemOf(status: number, detail = ''): Problem {
  switch (status) {
    case 0:
      return {
        reason: 'The Jupyter server does not answer. What is shown was last known.',
        advice: 'Is it still running? This page connects again by itself.'
      };
    case 401:
    case 403:
      return {
        reason: 'You may not see the GPUs through this Jupyter server.',
        advice:
          'Log in again by reloading the page, or ask whoever runs the server for the ' +
          'permission to read and write "gpunb".'
      };
    case 404:
      return {
        reason: 'The Jupyter server has no extension named gpunb.server.',
        advice:
          'Install gpunb where the server runs (pip install gpunb), see whether ' +
          '"jupyter server extension list" shows gpunb.server as enabled, and restart the server.'
      };
    default:
      return {
        reason: `The Jupyter server failed with status ${status}${detail ? `: ${detail}` : ''}.`,
        advice: 'Its log says more. This page tries again by itself.'
      };
  }
}

/** What the machine itself lacks; null if there is something to see. */
export function lackOf(state: State): Problem | null {
  const { problem, devices = [], notes = [] } = state.machine;
  if (state.sessions.size) {
    const any = [...state.sessions.values()].some(each => each.devices?.length);
    const said = [...state.sessions.values()].flatMap(each => each.notes ?? []);
    return any ? null : noDevices(said);
  }
  if (problem) {
    return { reason: `Sessions cannot be seen: ${problem}.`, advice: '' };
  }
  if (!devices.length) {
    return noDevices(notes);
  }
  return {
    reason: 'No kernel uses gpunb now.',
    advice: 'Start with "%load_ext gpunb" and a cell that begins with "%%gpu 0.5".'
  };
}

function noDevices(notes: readonly string[]): Problem {
  return {
    reason: ['No GPU was found.', ...notes.map(each => `${each}.`.replace(/\.\.$/, '.'))].join(' '),
    advice:
      '"gpunb doctor" in a terminal says more. To try things out without one, set ' +
      'GPUNB_SIMULATE=2xA100:40GiB before the server starts.'
  };
}

/** For the status bar, such as "GPU 1.5/2, 3 waiting". */
export function statusText(snapshot: Snapshot): string {
  const devices = snapshot.devices ?? [];
  const waiting = snapshot.counts?.waiting ?? 0;
  const used = devices.reduce((sum, device) => sum + usedShare(device), 0);
  const share = Math.round(used * 100) / 100;
  return `GPU ${share}/${devices.length}${waiting ? `, ${waiting} waiting` : ''}`;
}

function usedShare(device: Device): number {
  return 1 - device.free;
}
