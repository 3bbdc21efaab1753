// What the server says, as far as it is used here. Amounts of devices are 1.0 for one.

export type DeviceId = number | string;

/** What is held of a device: its resource, such as "GPU", its id, and the share. */
export type Holding = [string, DeviceId, number];

/** The device memory of a job in bytes: now, at most, and what its share amounts to. */
export interface Memory {
  now: number | null;
  peak: number | null;
  share: number | null;
}

export interface Session {
  pid: number;
  user?: string | null;
  /** The name of a head process; null in a kernel. */
  head?: string | null;
  notebook?: string | null;
  /** The kernel's id, as the server knows it. */
  kernel?: string | null;
  since?: number;
}

export interface Job {
  id: number;
  name: string;
  state: string;
  /** In its present state. */
  seconds: number;
  /** The placement group or the sweep of which it is a part. */
  part_of?: string | null;
  /** Of another version of gpunb it may be missing. */
  devices?: Holding[];
  kind?: string;
  cell?: number | null;
  cell_id?: string | null;
  background?: boolean;
  /** The kernel whose it is in a head process. */
  client?: Session | null;
  actor?: number | null;
  pid?: number | null;
  waits_for?: string | null;
  has_log?: boolean;
  memory?: Memory;
  gpu_seconds?: number;
  /** Which share would have been better. */
  hint?: string | null;
  /** When it was over, in seconds since 1970. */
  ended?: number;
  /** These are put in where sessions are joined: see `join`. */
  session?: Session;
  key?: string;
  owner?: string;
}

export interface Actor {
  id: number;
  name: string;
  state: string;
  seconds?: number | null;
  devices?: Holding[];
  part_of?: string | null;
  cell?: number | null;
  cell_id?: string | null;
  client?: Session | null;
  session?: Session;
  key?: string;
  owner?: string;
}

/** A placement group or a sweep. */
export interface Group {
  id: string;
  kind?: string;
  name?: string;
  /** The number of members in each state. */
  states?: Record<string, number>;
  /** When the first member was submitted, in seconds since 1970. */
  began?: number;
  /** The number of a placement group. */
  actor?: number | string | null;
  key?: string;
}

export interface Other {
  pid: number;
  share: number | null;
  kind: string;
}

export interface Device {
  id: DeviceId;
  key: string;
  name: string;
  type: string | null;
  memory: number | null;
  logical: boolean;
  /** Whether the sessions of this machine share it. */
  leased?: boolean;
  resource?: string;
  free: number;
  /** Who holds how much of it. */
  held: [number | string, number][];
  others: Other[];
  usage: Record<string, number | null>;
  health?: string | null;
  /** For which job it is kept. */
  kept?: string | null;
}

export interface Counts {
  running: number;
  waiting: number;
  finished: number;
  actors: number;
}

export interface Totals {
  gpu_seconds: number;
  /** Bytes that one job had at most. */
  peak?: number | null;
}

/** A part may be missing: another version of gpunb may run in the kernel. */
export interface Snapshot {
  version?: number;
  time?: number;
  session?: Session;
  devices?: Device[];
  cpus?: number;
  running?: Job[];
  waiting?: Job[];
  queued?: number;
  finished?: Job[];
  actors?: Actor[];
  groups?: Group[];
  counts?: Counts;
  totals?: Totals;
  warnings?: string[];
  notes?: string[];
  unmet?: Record<string, number>;
}

/** What the server found by itself where no session runs. */
export interface Machine {
  devices?: Device[];
  notes?: string[];
  problem?: string | null;
}

/** What has changed; of a session, the parts to be replaced. */
export interface News {
  sessions: Record<string, Snapshot>;
  gone: number[];
  whole: boolean;
  /** When it was sent, in seconds since 1970 on the server's clock. */
  time: number;
  machine?: Machine;
}
