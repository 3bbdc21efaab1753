// What a page leaves for the next one.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { PendingNavigations } from '../lib/pending_navigation.js';

const storage = () => {
  const items = new Map();
  return {
    items,
    getItem: key => items.get(key) ?? null,
    setItem: (key, value) => void items.set(key, value),
    removeItem: key => void items.delete(key)
  };
};

test('a cell is shown once, in its notebook', () => {
  const pending = new PendingNavigations(storage(), 'http://here/');
  pending.leave('a/b.ipynb', 'cell-3', 1000);
  assert.equal(pending.take('other.ipynb', 2000), null);
  assert.equal(pending.take('a/b.ipynb', 2000), 'cell-3');
  assert.equal(pending.take('a/b.ipynb', 2000), null);
});

test('what nobody came for is forgotten', () => {
  const kept = storage();
  const pending = new PendingNavigations(kept, 'http://here/');
  pending.leave('a.ipynb', 'cell-3', 1000);
  assert.equal(pending.take('other.ipynb', 70000), null);
  assert.equal(kept.items.size, 0);
});

test('another server, or something that is none of ours, is not asked', () => {
  const kept = storage();
  new PendingNavigations(kept, 'http://here/').leave('a.ipynb', 'cell-3', 1000);
  assert.equal(new PendingNavigations(kept, 'http://there/').take('a.ipynb', 1000), null);
  for (const key of kept.items.keys()) {
    kept.items.set(key, 'no JSON');
  }
  assert.equal(new PendingNavigations(kept, 'http://here/').take('a.ipynb', 1000), null);
});
