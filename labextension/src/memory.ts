// What the user has seen and folded, kept for the next page.

import { Memory } from './view/index.js';

/** Failures that stay marked as seen; of the oldest nothing is shown any more. */
const MOST = 200;

/** The memory of this server's pages. Calls `changed` when there is another failure that was seen. */
export function remembered(storage: Storage, server: string, changed: () => void): Memory {
  const name = `gpunb:seen:${server}`;
  const memory = new Memory(read(storage.getItem(name)));
  memory.changed = () => {
    storage.setItem(name, JSON.stringify([...memory.seen].slice(-MOST)));
    changed();
  };
  return memory;
}

function read(text: string | null): string[] {
  try {
    const found: unknown = JSON.parse(text ?? '[]');
    return Array.isArray(found) ? found.map(String) : [];
  } catch {
    return [];
  }
}
