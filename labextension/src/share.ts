// The line `%%gpu SHARE` of a cell. Pure.

const MAGIC = /^%%gpu(?=\s|$)([^\n]*)(\n|$)/;
/** The first word of a line, and the rest; an expression in braces may have spaces. */
const FIRST = /^\s*((?:\{[^{}]*\}|\S)*)\s*(.*?)\s*$/;
const SIZE = /^(\d+\.?\d*|\.\d+)\s*[kmgtp]?i?b$/i;
/** What IPython puts a value in place of: the kernel knows whether that is a share. */
const EXPRESSION = /\{[^{}]+\}|\$[A-Za-z_]/;

/** The share of a line, which is empty if there is none, and its options. */
function read(line: string): [share: string, options: string] {
  const [, first = '', rest = ''] = FIRST.exec(line) ?? [];
  return first.startsWith('-') ? ['', line.trim()] : [first, rest];
}

/** The cell's source with this share; one that has a line for gpunb keeps its options. */
export function withShare(source: string, share: string): string {
  const one = SIZE.test(share) ? share.replace(/\s+/g, '') : share;
  const found = MAGIC.exec(source);
  if (!found) {
    return `%%gpu ${one}\n${source}`;
  }
  const [whole, line = ''] = found;
  const [, options] = read(line);
  return `${['%%gpu', one, options].filter(Boolean).join(' ')}\n${source.slice(whole.length)}`;
}

/** The share that the cell has now; null if it is no GPU cell. */
export function shareOf(source: string): string | null {
  const found = MAGIC.exec(source);
  return found && (read(found[1] ?? '')[0] || '1');
}

/** What is wrong with a share that was typed; empty if nothing is. */
export function problemOf(share: string): string {
  if (share === 'auto' || SIZE.test(share) || EXPRESSION.test(share)) {
    return '';
  }
  const value = Number(share);
  if (share === '' || Number.isNaN(value) || value <= 0) {
    return 'Write a share such as 0.5, a whole number of GPUs, memory such as 10GiB, or auto.';
  }
  return value > 1 && !Number.isInteger(value)
    ? `${share} GPUs cannot be had: a share below 1, or a whole number of GPUs.`
    : '';
}
