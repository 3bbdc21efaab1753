// What is left for the next page.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { remembered } from '../lib/memory.js';
import { failures } from '../lib/view/index.js';

const storage = (items = new Map()) => ({
  getItem: key => items.get(key) ?? null,
  setItem: (key, value) => void items.set(key, value)
});

const failed = (id, ended) => ({ id, key: `1:${id}`, name: 'bad', state: 'failed', ended });

test('a failure counts until it was seen, in this page or in an earlier one', () => {
  const kept = storage();
  let changes = 0;
  const memory = remembered(kept, 'http://here/', () => (changes += 1));
  const finished = [failed(1, 10), failed(2, 20), { ...failed(3, 30), state: 'done' }];
  assert.deepEqual(failures({ finished }, memory).map(job => job.id), [1, 2]);
  memory.see(finished[0]);
  memory.see(finished[0]);
  memory.see(finished[2]);
  assert.equal(changes, 1);
  const next = remembered(kept, 'http://here/', () => {});
  assert.deepEqual(failures({ finished }, next).map(job => job.id), [2]);
  assert.equal(failures({ finished: [failed(1, 99)] }, next).length, 1, 'another job with its number');
  assert.equal(failures({ finished }, remembered(kept, 'http://there/', () => {})).length, 2);
});

test('what nobody wrote is no problem', () => {
  const kept = storage(new Map([['gpunb:seen:x', '{"no": "list"}'], ['gpunb:seen:y', 'no JSON']]));
  assert.equal(remembered(kept, 'x', () => {}).seen.size, 0);
  assert.equal(remembered(kept, 'y', () => {}).seen.size, 0);
});
