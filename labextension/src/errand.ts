// A cell to be shown by the page that opens its notebook, as Notebook 7 has one for each. Pure.

/** Milliseconds that the page may take. */
const LASTS = 60000;

/** The part of localStorage that is needed. */
export interface Storage {
  getItem(key: string): string | null;
  setItem(key: string, value: string): void;
  removeItem(key: string): void;
}

interface Errand {
  readonly path: string;
  readonly cell: string;
  readonly until: number;
}

/** What a page leaves for the next one of the same server. */
export class Errands {
  constructor(
    private readonly storage: Storage,
    baseUrl: string
  ) {
    this.key = `gpunb:errand:${baseUrl}`;
  }

  /** Have a cell shown by whoever opens the notebook next; `now` in milliseconds. */
  leave(path: string, cell: string, now: number): void {
    this.storage.setItem(this.key, JSON.stringify({ path, cell, until: now + LASTS }));
  }

  /** The cell that is to be shown in a notebook, once. */
  take(path: string, now: number): string | null {
    const errand = this.read();
    if (!errand || (errand.path !== path && now <= errand.until)) {
      return null;
    }
    this.storage.removeItem(this.key);
    return now <= errand.until ? errand.cell : null;
  }

  private read(): Errand | null {
    const text = this.storage.getItem(this.key);
    try {
      return text === null ? null : (JSON.parse(text) as Errand);
    } catch {
      return null;
    }
  }

  private readonly key: string;
}
