// The escape codes of terminals.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { plainText, stylesOf } from '../lib/view/ansi.js';

const ESC = '\u001b';
const texts = text => stylesOf(text).map(([each]) => each);

test('a colour holds until another one or a reset', () => {
  const [[plain, none], [red, colour], [bold, both], [rest, reset]] = stylesOf(
    `a${ESC}[31mb${ESC}[1mc${ESC}[0md`
  );
  assert.deepEqual([plain, red, bold, rest], ['a', 'b', 'c', 'd']);
  assert.deepEqual([none, reset], [{}, {}]);
  assert.equal(colour.color, 'var(--gm-red)');
  assert.deepEqual(both, { ...colour, fontWeight: 'bold' });
});

test('each number of a code counts, and an empty code is a reset', () => {
  const [[, one], [, two]] = stylesOf(`${ESC}[1;4;32ma${ESC}[mb`);
  assert.deepEqual(Object.keys(one), ['fontWeight', 'textDecoration', 'color']);
  assert.deepEqual(two, {});
  assert.equal(stylesOf(`${ESC}[31m${ESC}[39ma`)[0][1].color, '');
});

test('colours of 256 and of all', () => {
  const colour = code => stylesOf(`${ESC}[${code}ma`)[0][1];
  assert.equal(colour('38;5;196').color, 'rgb(255 0 0)');
  assert.equal(colour('38;5;255').color, 'rgb(238 238 238)');
  assert.equal(colour('38;5;1').color, colour('31').color);
  assert.equal(colour('48;2;1;2;3').backgroundColor, 'rgb(1 2 3)');
  assert.deepEqual(colour('38;2;1;2;3;1'), { color: 'rgb(1 2 3)', fontWeight: 'bold' });
});

test('codes that are no colours are left out', () => {
  const text = `a${ESC}[2Kb${ESC}[?25lc${ESC}]0;title\u0007d${ESC}(Be`;
  assert.equal(texts(text).join(''), 'abcde');
  assert.equal(plainText(text), 'abcde');
  assert.equal(plainText(`${ESC}[38;5;1mred${ESC}[0m\nplain`), 'red\nplain');
  assert.equal(plainText('[31m is no code'), '[31m is no code');
});

test('what a line has replaced is not shown', () => {
  assert.equal(texts('10%\r50%\r100%\nover\r\nend\r').join(''), '100%\nover\nend\r');
});
