// A cell to be shown by the page that opens its notebook, as Notebook 7 has one for each. Pure.

/** Milliseconds that the page may take. */
const LASTS = 60000;

/** The part of localStorage that is needed. */
export interface Storage {
  getItem(key: string): string | null;
  setItem(key: string, value: string): void;
  removeItem(key: string): void;
}

interface PendingNavigation {
  readonly path: string;
  readonly cell: string;
  readonly until: number;
}

/** What a page leaves for the next one of the same server. */
export class PendingNavigations {
  constructor(
    private readonly storage: Storage,
    baseUrl: string
  ) {
    this.key = `gpunb:pending-navigation:${baseUrl}`;
  }

  /** Have a cell shown by whoever opens the notebook next; `now` in milliseconds. */
  leave(path: string, cell: string, now: number): void {
    this.storage.setItem(this.key, JSON.stringify({ path, cell, until: now + LASTS }));
  }

  /** The cell that is to be shown in a notebook, once. */
  take(path: string, now: number): string | null {
    const next = this.read();
    if (!next || (next.path !== path && now <= next.until)) {
      return null;
    }
    this.storage.removeItem(this.key);
    return now <= next.until ? next.cell : null;
  }

  private read(): PendingNavigation | null {
    const text = this.storage.getItem(this.key);
    try {
      return text === null ? null : (JSON.parse(text) as PendingNavigation);
    } catch {
      return null;
    }
  }

  private readonly key: string;
}
