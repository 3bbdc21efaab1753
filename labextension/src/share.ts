// The line `%%gpu SHARE` of a cell. Pure.

const MAGIC = /^%%gpu(?=\s|$)([^\n]*)(\n|$)/;

/** The cell's source with this share; one that has a line for gpunb keeps its options. */
export function withShare(source: string, share: string): string {
  const found = MAGIC.exec(source);
  if (!found) {
    return `%%gpu ${share}\n${source}`;
  }
  const [whole, line = ''] = found;
  const words = line.trim().split(/\s+/).filter(Boolean);
  const options = words[0] !== undefined && !words[0].startsWith('-') ? words.slice(1) : words;
  return `${['%%gpu', share, ...options].join(' ')}\n${source.slice(whole.length)}`;
}

/** The share that the cell has now; null if it is no GPU cell. */
export function shareOf(source: string): string | null {
  const found = MAGIC.exec(source);
  const first = found?.[1]?.trim().split(/\s+/)[0];
  return !found ? null : first && !first.startsWith('-') ? first : '1';
}

/** What is wrong with a share that was typed; empty if nothing is. */
export function problemOf(share: string): string {
  if (/^\d+(\.\d+)?\s*[kmgt]i?b$/i.test(share)) {
    return '';
  }
  const value = Number(share);
  if (share === '' || Number.isNaN(value) || value <= 0) {
    return 'Write a share such as 0.5, a whole number of GPUs, or memory such as 10GiB.';
  }
  return value > 1 && !Number.isInteger(value)
    ? `${share} GPUs cannot be had: a share below 1, or a whole number of GPUs.`
    : '';
}
