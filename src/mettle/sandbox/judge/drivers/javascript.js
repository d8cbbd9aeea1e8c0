'use strict';
// Calls one function of a solution: `node driver.js solution.js`, the call on standard input, the value on descriptor 3.
//
// What is expected is not here, so that nothing the solution does to this process can make a wrong value right. All
// that this file uses is taken before the solution is loaded, so that one which extends Array.prototype, say, is
// still called properly. Only plain values travel: no proxy, getter or class instance is ever asked what it is.
// In both directions JSON is itself, but for objects with one key: $object and $map (pairs), $set, $int (hex),
// $float (nan, inf, -inf), $bytes (hex). Their twin is calls.py.

const { readFileSync, writeSync } = require('node:fs');
const { createRequire } = require('node:module');
const { runInThisContext } = require('node:vm');
const { isProxy } = require('node:util').types;
const { apply, getPrototypeOf, getOwnPropertyDescriptor, ownKeys, defineProperty } = Reflect;
const { isArray } = Array;
const { isFinite, isNaN } = Number;
const stringify = JSON.stringify;
const leave = process.reallyExit;
const ProcessObject = process;
const textOf = String;
const mapEach = Map.prototype.forEach;
const setEach = Set.prototype.forEach;
const hexOf = Buffer.prototype.toString;
const bytesOf = Buffer.from;
const bigHex = BigInt.prototype.toString;
const charAt = String.prototype.charAt;
const ArrayPrototype = Array.prototype, ObjectPrototype = Object.prototype;
const MapPrototype = Map.prototype, SetPrototype = Set.prototype;
const BytesPrototype = Uint8Array.prototype, BufferPrototype = Buffer.prototype;
const PlainTypeError = TypeError, PlainReferenceError = ReferenceError;
const MAX_DEPTH = 50, RESULT_FD = 3;

function decode(given) {
  if (given === null || typeof given !== 'object') return given;
  if (isArray(given)) return given.map(decode);
  const [tag] = Object.keys(given), body = given[tag];
  switch (tag) {
    case '$int': return body[0] === '-' ? -BigInt(`0x${body.slice(1)}`) : BigInt(`0x${body}`);
    case '$float': return { nan: NaN, inf: Infinity, '-inf': -Infinity }[body];
    case '$bytes': return new Uint8Array(Buffer.from(body, 'hex'));
    case '$set': return new Set(body.map(decode));
    case '$map': return new Map(body.map((pair) => pair.map(decode)));
    case '$object': {
      const made = {};
      for (const [key, value] of body) {
        defineProperty(made, key, { value: decode(value), writable: true, enumerable: true, configurable: true });
      }
      return made;
    }
  }
  throw new TypeError(`an argument with the tag ${tag}`);
}

function encode(value, depth) {
  if (depth > MAX_DEPTH) throw new PlainTypeError(`the returned value is nested deeper than ${MAX_DEPTH}`);
  switch (typeof value) {
    case 'undefined': return 'null';
    case 'boolean': return value ? 'true' : 'false';
    case 'number': return encodeNumber(value);
    case 'bigint': return `{"$int":"${apply(bigHex, value, [16])}"}`;
    case 'string': return encodeText(value);
    case 'object': return value === null ? 'null' : encodeObject(value, depth + 1);
  }
  throw new PlainTypeError(`a ${typeof value} cannot be compared; return plain values`);
}

function encodeNumber(value) {
  if (isFinite(value)) return textOf(value);
  return isNaN(value) ? '{"$float":"nan"}' : value > 0 ? '{"$float":"inf"}' : '{"$float":"-inf"}';
}

function encodeText(text) {
  const made = stringify(text);  // a solution may have given strings a toJSON
  if (typeof made !== 'string' || apply(charAt, made, [0]) !== '"') throw new PlainTypeError('no text');
  return made;
}

function encodeObject(value, depth) {
  if (isProxy(value)) throw new PlainTypeError('a Proxy cannot be compared; return plain values');
  const kind = getPrototypeOf(value);
  let inner = '', first = true;
  const add = (text) => { inner += first ? text : `,${text}`; first = false; };
  const addPair = (key, item) => add(`[${encode(key, depth)},${encode(item, depth)}]`);
  if (isArray(value) && kind === ArrayPrototype) {
    for (let index = 0; index < value.length; index += 1) add(encode(dataOf(value, index), depth));
    return `[${inner}]`;
  }
  if (kind === ObjectPrototype || kind === null) {
    const keys = ownKeys(value);
    for (let index = 0; index < keys.length; index += 1) {
      if (typeof keys[index] !== 'string') throw new PlainTypeError('an object with a symbol cannot be compared');
      addPair(keys[index], dataOf(value, keys[index]));
    }
    return `{"$object":[${inner}]}`;
  }
  if (kind === MapPrototype) {
    apply(mapEach, value, [(item, key) => addPair(key, item)]);
    return `{"$map":[${inner}]}`;
  }
  if (kind === SetPrototype) {
    apply(setEach, value, [(item) => add(encode(item, depth))]);
    return `{"$set":[${inner}]}`;
  }
  if (kind === BytesPrototype || kind === BufferPrototype) {
    return `{"$bytes":"${apply(hexOf, bytesOf(value), ['hex'])}"}`;
  }
  throw new PlainTypeError('an object of a class cannot be compared; return plain values');
}

function dataOf(object, key) {
  const property = getOwnPropertyDescriptor(object, key);
  if (property === undefined) return undefined;  // a hole in an array
  if (getOwnPropertyDescriptor(property, 'value') === undefined) {
    throw new PlainTypeError('a property with a getter cannot be compared; return plain values');
  }
  return property.value;
}

function load(path) {
  const module = { exports: {}, filename: path, id: path };
  const names = { require: createRequire(path), module, exports: module.exports, __filename: path, __dirname: process.cwd() };
  for (const name of Object.keys(names)) {
    defineProperty(globalThis, name, { value: names[name], writable: true, configurable: true });
  }
  process.argv = [process.argv[0], path];
  runInThisContext(readFileSync(path, 'utf8'), { filename: path });
  return module;
}

// Top-level `const` and `class` belong to no object, so that a name is looked up as code would.
function find(module, name) {
  const look = (word) => runInThisContext(`typeof ${word} === 'undefined' ? undefined : ${word}`);
  const found = look(name);
  if (typeof found === 'function') return found;
  const exported = module.exports;
  if (typeof exported === 'function' && exported.name === name) return exported;
  if (exported !== null && exported !== undefined && typeof exported[name] === 'function') return exported[name];
  const Solution = look('Solution');
  if (typeof Solution === 'function') {
    const solution = new Solution();
    if (typeof solution[name] === 'function') return (...given) => solution[name](...given);
  }
  throw new PlainReferenceError(`the code defines no function ${name}`);
}

function send(text) {
  const bytes = bytesOf(text);
  for (let start = 0; start < bytes.length;) start += writeSync(RESULT_FD, bytes, start);
}

async function main() {
  const [name, given] = JSON.parse(readFileSync(0, 'utf8'));
  const args = given.map(decode);
  const module = load(process.argv[2]);
  send(encode(await apply(find(module, name), undefined, args), 0));
}

main().then(
  () => apply(leave, ProcessObject, [0]),
  (error) => {
    try {
      writeSync(2, `${(error && error.stack) || ''}\nuncaught: ${error}\n`);
    } finally {
      apply(leave, ProcessObject, [1]);
    }
  },
);
