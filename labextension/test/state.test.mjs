// The state of the machine, and what is made of it.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { jobsByCell } from '../lib/badges.js';
import { endings, duration, sentence, toneOf } from '../lib/endings.js';
import { isSweep, merge, keyOf, partsOf } from '../lib/merge.js';
import { NOTHING, after } from '../lib/state.js';
import { lackOf, problemOf, statusText } from '../lib/summary.js';

const job = (id, more = {}) => ({ id, name: `In[${id}]`, state: 'running', seconds: 0, devices: [], ...more });

const device = (more = {}) => ({
  id: 0,
  key: 'GPU-a',
  name: 'A100',
  type: 'A100',
  memory: 1,
  logical: false,
  free: 1,
  held: [],
  others: [],
  usage: {},
  ...more
});

const snapshot = (pid, more = {}) => ({
  time: 100,
  session: { pid, notebook: `/home/me/nb-${pid}.ipynb`, kernel: `kernel-${pid}` },
  devices: [],
  running: [],
  waiting: [],
  finished: [],
  actors: [],
  queued: 0,
  ...more
});

const news = (sessions, more = {}) => ({ sessions, gone: [], whole: false, ...more });
const machine = (...snapshots) =>
  after(NOTHING, news(Object.fromEntries(snapshots.map(each => [each.session.pid, each])), { whole: true }), 100);

test('parts of a session are replaced, and the rest stays', () => {
  const before = machine(snapshot(1, { notes: ['kept'], running: [job(1)] }));
  const now = after(before, news({ 1: { time: 101, running: [] } }), 101);
  assert.deepEqual(now.sessions.get(1).running, []);
  assert.deepEqual(now.sessions.get(1).notes, ['kept']);
  assert.equal(before.sessions.get(1).running.length, 1);
});

test('jobs that are not told again have grown older', () => {
  const old = [job(1, { seconds: 5 })];
  const before = machine(snapshot(1, { running: old }), snapshot(2, { running: old }));
  const now = after(before, news({ 1: { time: 103, finished: [] } }), 103);
  assert.equal(now.sessions.get(1).running[0].seconds, 8);
  assert.equal(now.sessions.get(2).running[0].seconds, 8, 'another session says nothing');
  assert.equal(now.sessions.get(2).time, 103);
});

test('what was told late has the age of the moment at which it was sent', () => {
  const holds = device({ resource: 'GPU', held: [[1, 0.5]] });
  const told = snapshot(1, { running: [job(1, { seconds: 3 })], devices: [holds], totals: { gpu_seconds: 2 } });
  const now = after(machine(told), news({ 2: snapshot(2, { time: 109, running: [job(1, { seconds: 4 })] }) }), 110);
  assert.equal(now.sessions.get(1).running[0].seconds, 13);
  assert.equal(now.sessions.get(1).totals.gpu_seconds, 7, 'half a GPU for ten seconds');
  assert.equal(now.sessions.get(2).running[0].seconds, 5);
  assert.equal(merge(now).time, 110);
});

test('a session that is gone is forgotten, also when another has its number', () => {
  const before = machine(snapshot(1, { notes: ['old'] }), snapshot(2));
  const now = after(before, news({ 1: snapshot(1) }, { gone: [1, 2] }), 1);
  assert.deepEqual([...now.sessions.keys()], [1]);
  assert.equal(now.sessions.get(1).notes, undefined);
});

test('everything replaces everything', () => {
  const now = after(machine(snapshot(1)), news({ 2: snapshot(2) }, { whole: true, machine: {} }), 1);
  assert.deepEqual([...now.sessions.keys()], [2]);
});

test('what a head process runs is said to be of the notebook that wants it', () => {
  const client = { pid: 5, notebook: '/home/me/nb-5.ipynb', kernel: 'kernel-5' };
  const head = snapshot(1, {
    running: [job(7, { client, kind: 'cell', cell_id: 'a' }), job(8, { client, kind: 'ranks', cell_id: 'b' })],
  });
  const state = machine({ ...head, session: { pid: 1, notebook: null, kernel: null, head: 'lab' } });
  const [seen] = merge(state).running;
  assert.deepEqual([seen.owner, seen.session, seen.key], ['nb-5', client, '1:7']);
  assert.deepEqual([...jobsByCell(state, 'kernel-5').keys()], ['a', 'b']);
  assert.equal(jobsByCell(state, 'kernel-6').size, 0);
  const over = { finished: [job(7, { client, kind: 'cell', background: true, state: 'done' })] };
  const [told] = endings(state, after(state, news({ 1: { ...over, running: [] } }), 1));
  assert.match(sentence(told), /is done .*nb-5/);
  const gone = endings(state, after(state, news({}, { gone: [1] }), 1));
  assert.match(sentence(gone[0]), /^The head process lab has ended/);
});

test('sessions are joined on the devices that they share', () => {
  const shared = held => device({ held, free: 0.5 });
  const joined = merge(
    machine(
      snapshot(1, {
        devices: [device({ held: [[7, 0.5]], free: 0.25, others: [{ pid: 2, share: 0.25, kind: 'kernel' }] })],
        running: [job(7)]
      }),
      snapshot(2, { devices: [shared([[7, 0.25]])], running: [job(7)] })
    )
  );
  assert.equal(joined.devices.length, 1);
  assert.deepEqual(joined.devices[0].held, [['1:7', 0.5], ['2:7', 0.25]]);
  assert.deepEqual(joined.devices[0].others, []);
  assert.equal(joined.devices[0].free, 0.25);
  assert.deepEqual(joined.running.map(each => [each.key, each.owner]), [['1:7', 'nb-1'], ['2:7', 'nb-2']]);
  assert.equal(joined.counts.running, 2);
});

test('what belongs together in a session stays together', () => {
  const parts = {
    running: [job(1, { part_of: 'sweep 1' })],
    actors: [job(7), job(8, { part_of: 'group 7' })],
    groups: [{ id: 'sweep 1', actor: null }, { id: 'group 7', actor: 7 }]
  };
  const joined = merge(machine(snapshot(1, parts), snapshot(2, parts)));
  const groups = new Map(joined.groups.map(each => [each.key, each.actor]));
  assert.deepEqual([...groups.keys()], ['1:sweep 1', '1:group 7', '2:sweep 1', '2:group 7']);
  assert.equal(groups.get('2:group 7'), joined.actors[2].key);
  assert.deepEqual(joined.running.map(each => each.part_of), ['1:sweep 1', '2:sweep 1']);
});

test('devices in the books of a session are its own', () => {
  const logical = device({ key: 'sim:0', logical: true, held: [[1, 1]], free: 0 });
  const joined = merge(machine(snapshot(1, { devices: [logical] }), snapshot(2, { devices: [logical] })));
  assert.deepEqual(joined.devices.map(each => each.key), ['1:sim:0', '2:sim:0']);
  assert.match(joined.devices[0].type, /nb-1/);
});

test('devices without hardware that sessions share are joined as well', () => {
  const shared = (id, more) => device({ key: 'logical:0', logical: true, leased: true, held: [[id, 0.5]], free: 0, ...more });
  const other = { pid: 1, share: 0.5, kind: 'kernel' };
  const joined = merge(
    machine(
      snapshot(1, { devices: [shared(7, { others: [{ ...other, pid: 2 }] })] }),
      snapshot(2, { devices: [shared(3, { others: [other] })] })
    )
  );
  assert.deepEqual(joined.devices.map(each => [each.key, each.held.length, each.others.length]), [['logical:0', 2, 0]]);
  assert.equal(statusText(joined), 'GPU 1/1');
});

test('a single session needs no name at each job', () => {
  assert.equal(merge(machine(snapshot(1, { running: [job(1)] }))).running[0].owner, undefined);
});

test('what outsiders hold stays', () => {
  const outsider = { pid: 9, share: null, kind: 'outsider' };
  const joined = merge(machine(snapshot(1, { devices: [device({ others: [outsider] })] })));
  assert.deepEqual(joined.devices[0].others, [outsider]);
});

test('without sessions the machine is shown', () => {
  const state = after(NOTHING, news({}, { whole: true, machine: { devices: [device()] } }), 0);
  assert.equal(merge(state).devices.length, 1);
});

test('parts that another version does not send are no problem', () => {
  const joined = merge(after(NOTHING, news({ 3: {} }, { whole: true }), 0));
  assert.deepEqual(joined.running, []);
});

test('a key says of whom and which', () => {
  assert.deepEqual(partsOf(keyOf(12, 7)), { pid: 12, id: 7 });
  assert.deepEqual(partsOf(keyOf(12, 'sweep 3')), { pid: 12, id: 'sweep 3' });
  assert.deepEqual([keyOf(12, 'sweep 3'), keyOf(12, 7)].map(isSweep), [true, false]);
  assert.throws(() => partsOf('nothing'), /names no job/);
});

test('background cells that end are told once, oldest first', () => {
  const cell = (id, more = {}) => job(id, { kind: 'cell', background: true, state: 'done', ...more });
  const before = machine(snapshot(1, { finished: [cell(1)] }));
  const now = machine(
    snapshot(1, { finished: [cell(3, { state: 'failed' }), cell(2), cell(4, { background: false }), cell(5, { kind: 'ranks' }), cell(1)] })
  );
  assert.deepEqual(endings(before, now).map(each => each.job.id), [5, 2, 3]);
  assert.deepEqual(endings(now, now), []);
  assert.deepEqual(endings(NOTHING, now), [], 'what ended before the page was loaded is old');
});

test('a job that has ended in a new session is told if that was just now', () => {
  const cell = (id, ended) => job(id, { kind: 'cell', background: true, state: 'failed', ended });
  const now = machine(snapshot(1, { time: 100, finished: [cell(2, 99), cell(1, 20)] }));
  assert.deepEqual(endings(machine(), now).map(each => each.job.id), [2]);
});

test('a session that leaves work behind is told', () => {
  const before = machine(snapshot(1, { running: [job(1)], queued: 2 }), snapshot(2));
  const [ending, ...more] = endings(before, machine());
  assert.equal(ending.lost, 3);
  assert.deepEqual(more, []);
  assert.match(sentence(ending), /kernel of nb-1.ipynb has ended, and 3 jobs/);
});

test('an ending in words', () => {
  const ended = { what: 'job', job: job(7, { name: 'train', state: 'failed', seconds: 63 }), session: { pid: 5 } };
  assert.equal(sentence(ended), '#7 train has failed after 1:03 (process 5)');
});

test('what was cancelled is told as neither a success nor a failure', () => {
  const tone = state => toneOf({ what: 'job', job: job(7, { state }), session: { pid: 5 } });
  assert.deepEqual(['done', 'failed', 'cancelled'].map(tone), ['success', 'error', 'info']);
  assert.equal(toneOf({ what: 'session', session: { pid: 5 }, lost: 1 }), 'error');
});

test('durations', () => {
  assert.deepEqual([1.26, 12.4, 59.6, 3725].map(duration), ['1.3 s', '12 s', '1:00', '1:02:05']);
});

test('the status bar counts shares and those who wait', () => {
  const text = statusText({ devices: [device({ free: 0.25 }), device({ free: 1 })], counts: { waiting: 2 } });
  assert.equal(text, 'GPU 0.75/2, 2 waiting');
});

test('each lack says why and what to do', () => {
  for (const status of [0, 403, 404, 500]) {
    const { reason, advice } = problemOf(status);
    assert.ok(reason && advice, `${status}`);
  }
  assert.match(problemOf(404).advice, /pip install gpunb/);
  const none = after(NOTHING, news({}, { whole: true, machine: { devices: [], notes: ['NVML is missing'] } }), 0);
  assert.match(lackOf(none).reason, /No GPU was found. NVML is missing./);
  assert.match(lackOf(none).advice, /gpunb doctor/);
  const idle = after(NOTHING, news({}, { whole: true, machine: { devices: [device()] } }), 0);
  assert.match(lackOf(idle).advice, /%%gpu/);
  const closed = after(NOTHING, news({}, { whole: true, machine: { problem: 'the folder is not ours' } }), 0);
  assert.match(lackOf(closed).reason, /the folder is not ours/);
  assert.equal(lackOf(machine(snapshot(1, { devices: [device()] }))), null);
  assert.match(lackOf(machine(snapshot(1))).reason, /No GPU/);
});
