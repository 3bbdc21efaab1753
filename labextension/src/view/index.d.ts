// The drawing of lanes, from gpunb/live/view/.

import type { Device, Job, Snapshot } from '../types';

export interface View {
  update(snapshot: Snapshot, kernels?: Snapshot[]): void;
  dispose(): void;
}

/** What a job has shown from a position on. */
export interface Part {
  text: string;
  state: string | null;
  truncated: boolean;
  /** Where the next part begins. */
  position: number;
}

/** A rejected promise is shown with its message. */
export interface Actions {
  cancel?(key: string, force: boolean): Promise<void>;
  interrupt?(key: string): Promise<void>;
  kill?(key: string): Promise<void>;
  stop?(key: string): Promise<void>;
  logs?(key: string, position: number): Promise<Part>;
  goTo?(job: Job): Promise<void>;
  /** Shows a log elsewhere. */
  openLogs?(job: Job): Promise<void>;
}

/** What a view leaves for the next one. */
export class Memory {
  constructor(seen?: Iterable<string>);
  readonly seen: Set<string>;
  /** Called when there is another failure that was seen. */
  changed: () => void;
}

/** The failures that nobody has seen yet. */
export function failures(snapshot: Snapshot, memory: Memory): Job[];

/** Whether no other session can hold a part of a device. */
export function isPrivate(device: Device): boolean;

/** The shares of a device in a small place, without words. */
export function drawShares(element: HTMLElement, device: Device, snapshot: Snapshot): void;

/** "GPU 0" */
export function deviceText(device: Device): string;

/** A share in at most four decimals. */
export function shareText(share: number): string;

/** Another machine's clock, as the times in its messages tell it. */
export class Clock {
  /** Messages are asked for now: those that come from now on were sent later. */
  ask(): void;
  /** Take note of a message that was sent at this time. */
  hear(time: number): void;
  /** Whether the page has slept, or its own clock was set, since it was last asked. */
  jumped(): boolean;
  /** Forget the messages. */
  reset(): void;
  /** The time there, in seconds since 1970. */
  now(): number;
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

/** How many are in each state: "3 running, 12 waiting". */
export function statesText(states: Record<string, number>): string;

/** The GPU-seconds that a second adds. */
export function gpuRate(snapshot: Snapshot): number;

/** What a job has shown, without the escape codes of terminals. */
export function plainText(text: string): string;

/** With control characters escaped, for a place that shows one line. */
export function printable(text: string): string;

export function render(
  element: HTMLElement,
  snapshot: Snapshot | null,
  options?: {
    actions?: Actions;
    kernels?: Snapshot[];
    busy?: string;
    clock?: Clock;
    memory?: Memory;
  }
): View;
