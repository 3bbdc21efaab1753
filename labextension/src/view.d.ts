// The drawing of lanes, from gpunb/notebook/monitor/view.js.

import type { Job, Snapshot } from './types';

export interface View {
  update(snapshot: Snapshot, kernels?: Snapshot[]): void;
  dispose(): void;
}

/** A rejected promise is shown with its message. */
export interface Actions {
  cancel?(key: string, force: boolean): Promise<void>;
  interrupt?(key: string): Promise<void>;
  kill?(key: string): Promise<void>;
  logs?(key: string): Promise<string>;
  goTo?(job: Job): Promise<void>;
}

/** Draws; but while a button in what it watches is pressed, only once that is let go. */
export class Calm {
  readonly pressed: boolean;
  watch(element: HTMLElement): void;
  draw(what: () => void): void;
  dispose(): void;
}

/** What a job has: "GPU 0 (0.5), NPU 1 (1)". */
export function devicesText(job: Job): string;

export function render(
  element: HTMLElement,
  snapshot: Snapshot | null,
  options?: { actions?: Actions; kernels?: Snapshot[]; busy?: string }
): View;
