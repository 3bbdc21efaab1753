// The clock of the kernel, as a page knows it from the times of messages.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Clock } from '../lib/view/clock.js';

/** A page whose clock is ahead of the kernel's: `hear` a message after some seconds on its way. */
function page(ahead, context) {
  const page = { kernel: 1000, slept: 0 };
  context.mock.method(Date, 'now', () => 1000 * (page.kernel + ahead));
  context.mock.method(performance, 'now', () => 1000 * (page.kernel - page.slept));
  const clock = new Clock();
  page.hear = (answered, taken) => {
    page.kernel += answered;
    const sent = page.kernel;
    page.kernel += taken;
    clock.hear(sent);
  };
  page.off = () => Math.round(100 * (clock.now() - page.kernel)) / 100;
  return { page, clock };
}

test('the first message tells how far the clocks are apart', context => {
  for (const ahead of [20, -20, 3, 7200, 0]) {
    const { page: here } = page(ahead, context);
    here.hear(0.1, 0.25);
    assert.equal(here.off(), ahead === 0 ? 0 : -0.25, `${ahead}`);
    context.mock.restoreAll();
  }
});

test('of several messages the one that took least tells it best', context => {
  const { page: here } = page(20, context);
  for (const [taken, off] of [[4, -4], [0.5, -0.5], [2, -0.5], [0.1, -0.1]]) {
    here.hear(1, taken);
    assert.equal(here.off(), off);
  }
});

test('a busy page is no difference of the clocks', context => {
  const { page: here } = page(0, context);
  here.hear(0.1, 9);
  assert.equal(here.off(), 0);
  here.hear(60, 9);
  assert.equal(here.off(), 0);
});

test('what is known stays when the page asks again, and is forgotten when it slept', context => {
  const { page: here, clock } = page(20, context);
  here.hear(0.1, 0.1);
  clock.ask();
  assert.equal(here.off(), -0.1);
  here.slept = 50;
  here.kernel += 50;
  here.hear(0, 5); // it may have come while the page slept
  assert.equal(here.off(), 20, 'nothing is known');
  here.hear(0.1, 0.2);
  assert.equal(here.off(), -0.2);
});

test('a message that was on its way when the page asked tells nothing', context => {
  const { page: here, clock } = page(0, context);
  here.hear(0.1, 0.2);
  clock.hear(here.kernel - 9);
  assert.equal(here.off(), 0);
});

test('before the first message it is the own clock', context => {
  const { page: here } = page(0, context);
  here.kernel += 10;
  assert.equal(here.off(), 0);
});
