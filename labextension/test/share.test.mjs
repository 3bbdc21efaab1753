// The first line of a GPU cell.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { problemOf, shareOf, withShare } from '../lib/share.js';

test('a share is put before the cell', () => {
  assert.equal(withShare('x = 1\ny = 2', '0.5'), '%%gpu 0.5\nx = 1\ny = 2');
  assert.equal(withShare('%%time\nx', '2'), '%%gpu 2\n%%time\nx');
});

test('a GPU cell gets another share and keeps its options', () => {
  assert.equal(withShare('%%gpu 1 --bg -n a\nx', '0.5'), '%%gpu 0.5 --bg -n a\nx');
  assert.equal(withShare('%%gpu --bg\nx', '0.5'), '%%gpu 0.5 --bg\nx');
  assert.equal(withShare('%%gpu\nx', '0.5'), '%%gpu 0.5\nx');
  assert.equal(withShare('%%gpus 1\nx', '0.5'), '%%gpu 0.5\n%%gpus 1\nx');
  assert.equal(withShare('%%gpu auto --bg\nx', 'auto'), '%%gpu auto --bg\nx');
  assert.equal(withShare('%%gpu {1 / n} --bg\nx', '0.5'), '%%gpu 0.5 --bg\nx');
  assert.equal(withShare('%%gpu 1 --bg\nx', '{1 / n}'), '%%gpu {1 / n} --bg\nx');
  assert.equal(withShare('%%gpu 1\nx', '10 GiB'), '%%gpu 10GiB\nx');
});

test('the share that a cell has', () => {
  assert.equal(shareOf('%%gpu 0.25 --bg\nx'), '0.25');
  assert.equal(shareOf('%%gpu --bg\nx'), '1');
  assert.equal(shareOf('%%gpu\nx'), '1');
  assert.equal(shareOf('%%gpu auto --bg\nx'), 'auto');
  assert.equal(shareOf('%%gpu {1 / n} --bg\nx'), '{1 / n}');
  assert.equal(shareOf('x'), null);
});

test('what cannot be a share is refused', () => {
  const expressions = ['{1 / n}', '{n}GiB', '$share'];
  for (const good of ['0.5', '1', '16', '10GiB', '500 MB', '.5', 'auto', ...expressions]) {
    assert.equal(problemOf(good), '', good);
  }
  for (const bad of ['', '0', '-1', '1.5', 'two', '10 apples', 'automatic', '{}', '$']) {
    assert.notEqual(problemOf(bad), '', bad);
  }
});
