// Bundles lib/ for JupyterLab into ../gpunb/labextension, with the drawing of lanes, which the
// widget and this extension share.

import { execFileSync } from 'node:child_process';
import { copyFileSync, cpSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { fileURLToPath } from 'node:url';

const here = path => fileURLToPath(new URL(path, import.meta.url));
const find = createRequire(import.meta.url).resolve;

const monitor = name => here(`../gpunb/live/${name}`);
cpSync(monitor('view'), here('lib/view'), { recursive: true });
copyFileSync(monitor('view.css'), here('style/view.css'));
rmSync(here('../gpunb/labextension'), { recursive: true, force: true });
execFileSync(
  process.execPath,
  [
    find('@jupyter/builder/lib/build-labextension.js'),
    '--core-package-file',
    find('@jupyterlab/core-meta/core.package.json'),
    here('.')
  ],
  { stdio: ['ignore', 'inherit', 'inherit'] }
);

// The bundler's own runtime is in every bundle, and in no list of modules.
const licences = here('../gpunb/labextension/static/third-party-licenses.json');
const found = JSON.parse(readFileSync(licences, 'utf8'));
const bundler = file => readFileSync(here(`node_modules/@rspack/core/${file}`), 'utf8');
const { name, version, license } = JSON.parse(bundler('package.json'));
found.packages.push({
  name,
  versionInfo: version,
  licenseId: license,
  extractedText: bundler('LICENSE')
});
writeFileSync(licences, JSON.stringify(found, null, 2) + '\n');
