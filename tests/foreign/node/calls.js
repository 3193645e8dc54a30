// Cases on raw bytes.
'use strict';

const { check, grpc, sleep } = require('./client');

const { status } = grpc;
const special = '\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \u{1F608}\t\n%41';

async function unary(t) {
  for (const size of [0, 1, 16384, 65535, 271828]) {
    const request = Buffer.alloc(size, 7);
    check(request.equals(await t.unary('Unary', request)), size, 'bytes came back as others');
  }
}

async function client_stream(t) {
  const answer = await new Promise((resolve, reject) => {
    const call = t.client.makeClientStreamRequest('/test.Echo/ClientStream', (v) => v, (v) => v,
      (error, value) => (error ? reject(error) : resolve(value)));
    for (const size of [27182, 8, 1828, 45904]) call.write(Buffer.alloc(size));
    call.end();
  });
  check(String(answer) === '4 74922', answer);
}

async function server_stream(t) {
  const call = t.client.makeServerStreamRequest('/test.Echo/ServerStream', (v) => v, (v) => v, Buffer.from('40 31415'));
  let number = 0;
  for await (const answer of call) check(answer.length === 31415 && answer[0] === number++, 'message', number);
  check(number === 40, number, 'messages');
}

async function ping_pong(t) {
  const talk = t.stream('/test.Echo/BidiStream');
  for (const size of [27182, 8, 1828, 45904, 0]) await talk.echoed(Buffer.alloc(size));
  talk.call.end();
  check((await talk.status()).code === status.OK);
}

async function empty_stream(t) {
  const talk = t.stream('/test.Echo/BidiStream');
  talk.call.end();
  check((await talk.status()).code === status.OK);
}

async function first_word(t) {
  const talk = t.stream('/test.Talk/Greet');
  check(String(await talk.recv()) === 'hello');
  await talk.echoed(Buffer.from('answer'));
  talk.call.end();
  check((await talk.status()).code === status.OK);
}

async function early_end(t) {
  for (let round = 0; round < 20; round++) {
    const talk = t.stream('/test.Talk/First');
    for (let number = 0; number < 50; number++) talk.call.write(Buffer.alloc(10000));
    check((await talk.recv()).length === 10000);
    check((await talk.status()).code === status.OK);
  }
}

async function deadline(t) {
  const before = (await t.stats()).counts.slow_cancelled || 0;
  const error = await t.failure('Slow', undefined, { timeoutMs: 200 });
  check(error.code === status.DEADLINE_EXCEEDED, error);
  await t.await('the server sees it', (s) => s.num_slow === 0 && s.counts.slow_cancelled === before + 1);
}

async function deadline_stream(t) {
  await unary(t); // the connection is there
  const talk = t.stream('/test.Echo/BidiStream', { timeoutMs: 100 });
  await talk.echoed(Buffer.from('a'));
  check((await talk.status()).code === status.DEADLINE_EXCEEDED);
  const error = await t.failure('Slow', undefined, { timeoutMs: 1 });
  check(error.code === status.DEADLINE_EXCEEDED, error);
}

async function cancel(t) {
  const before = (await t.stats()).counts.slow_cancelled || 0;
  let call;
  const failed = t.failure('Slow', undefined, { onCall: (made) => { call = made; } });
  await t.await('it runs', (s) => s.num_slow === 1);
  call.cancel();
  check((await failed).code === status.CANCELLED);
  await t.await('the server sees it', (s) => s.num_slow === 0 && s.counts.slow_cancelled === before + 1);
}

async function cancel_before_messages(t) {
  const talk = t.stream('/test.Echo/ClientStream');
  talk.call.cancel();
  check((await talk.status()).code === status.CANCELLED);
}

async function cancel_after_answer(t) {
  const talk = t.stream('/test.Echo/BidiStream');
  await talk.echoed(Buffer.alloc(27182));
  talk.call.cancel();
  check((await talk.status()).code === status.CANCELLED);
}

const PAIRS = [['initial-text', 'some text'], ['initial-text', 'and more'], ['initial-a-bin', ''], ['initial-b-bin', '00'],
  ['initial-c-bin', 'fffe'], ['trailing-d-bin', 'ababab'], ['trailing-d-bin', '00010203'], ['trailing-text', '~!,;=']];

function sent(more = {}) {
  const metadata = new grpc.Metadata();
  for (const [name, value] of [...PAIRS, ...Object.entries(more)]) {
    metadata.add(name, name.endsWith('-bin') ? Buffer.from(value, 'hex') : value);
  }
  return metadata;
}

function same(got, prefix) {
  for (const [name] of PAIRS.filter((pair) => pair[0].startsWith(prefix))) {
    const values = got.get(name).map((value) => (typeof value === 'string' ? value : value.toString('hex')));
    const expected = PAIRS.filter((pair) => pair[0] === name).map((pair) => pair[1]);
    check(values.join('|') === expected.join('|') || values.join('|') === expected.join(', '), name, values, 'not', expected);
  }
}

async function metadata(t) {
  for (const code of [0, 5]) {
    let headers;
    let end;
    await new Promise((resolve) => {
      const call = t.client.makeUnaryRequest('/test.Echo/Status', (v) => v, (v) => v, Buffer.alloc(0),
        sent({ 'want-code': String(code) }), () => {});
      call.on('metadata', (got) => { headers = got; });
      call.on('status', (got) => { end = got; resolve(); });
    });
    check(end.code === code, end.code);
    same(headers, 'initial-');
    same(end.metadata, 'trailing-');
  }
  const got = JSON.parse(await t.unary('Meta', undefined, { metadata: sent() })).map((pair) => pair.join('='));
  for (const pair of PAIRS) check(got.includes(pair.join('=')), pair, 'is not in', got);
}

async function metadata_stream(t) {
  const talk = t.stream('/test.Talk/End', { metadata: sent() });
  same(await talk.metadata, 'initial-'); // before any message
  await talk.echoed(Buffer.from('a'));
  same((await talk.status()).metadata, 'trailing-');
}

async function status_codes(t) {
  for (let code = 1; code <= 16; code++) {
    const metadata = sent({ 'want-code': String(code), 'want-details': `code ${code}` });
    const error = await t.failure('Status', undefined, { metadata });
    check(error.code === code && error.details === `code ${code}`, error);
  }
  const error = await t.failure('/test.Talk/Fail', Buffer.from(special));
  check(error.code === status.UNKNOWN && error.details === special, JSON.stringify(error.details));
}

async function status_stream(t) {
  const metadata = sent({ 'want-code': '2', 'want-details': 'test status message' });
  const talk = t.stream('/test.Talk/End', { metadata });
  await talk.echoed(Buffer.from('a'));
  const end = await talk.status();
  check(end.code === 2 && end.details === 'test status message', end.details);
  same(end.metadata, 'trailing-');
}

async function unimplemented(t) {
  for (const path of ['/test.Echo/Nothing', '/test.Nobody/Unary']) {
    check((await t.failure(path)).code === status.UNIMPLEMENTED, path);
  }
}

async function gzip(t) {
  const request = Buffer.from('compress me '.repeat(100000));
  for (const algorithm of [0, 2]) {
    const client = t.connect({ 'grpc.default_compression_algorithm': algorithm });
    for (const path of ['/test.Echo/Unary', '/test.Talk/Compressed']) {
      check(request.equals(await t.unary(path, request, { client })), path);
    }
    t.client = client;
    const talk = t.stream('/test.Talk/CompressedStream');
    for (const size of [0, 1, 1200000]) await talk.echoed(request.subarray(0, size));
  }
}

async function big(t) {
  const request = Buffer.alloc(40000000, '0123456789');
  check(request.equals(await t.unary('Unary', request)), 'other bytes came back');
}

async function too_large(t) {
  const error = await t.failure('Size', Buffer.alloc(200000));
  check(error.code === status.RESOURCE_EXHAUSTED, error);
  await t.unary('Unary', Buffer.alloc(1000));
}

const together = (number, run) => Promise.all(Array.from({ length: number }, (_, index) => run(index)));

async function concurrent_streams(t) {
  const talks = await together(100, async (index) => {
    const talk = t.stream('/test.Echo/BidiStream');
    await talk.echoed(Buffer.from([index]));
    return talk;
  });
  await Promise.all(talks.map(async (talk, index) => {
    for (let number = 0; number < 20; number++) await talk.echoed(Buffer.alloc(number * 500, index));
    talk.call.end();
    check((await talk.status()).code === status.OK);
  }));
}

async function concurrent_large(t) {
  await together(100, async (index) => {
    const request = Buffer.alloc(271828, index);
    check(request.equals(await t.unary('Unary', request)), index);
  });
}

async function few_streams(t) {
  await t.unary('Unary'); // the server's settings have come
  await together(200, async (index) => check((await t.unary('Unary', Buffer.from([index])))[0] === index));
}

async function ten_thousand(t) {
  for (let number = 0; number < 10000; number++) {
    const answer = await t.unary('Unary', Buffer.from(String(number)));
    check(String(answer) === String(number), answer, 'not', number);
  }
}

async function large_headers(t) {
  const metadata = new grpc.Metadata();
  metadata.set('x-large', 'x'.repeat(63000));
  try {
    await t.unary('Unary', undefined, { metadata });
  } catch (error) {
    check(error.code !== status.DEADLINE_EXCEEDED, error);
  }
  metadata.set('x-large', 'x'.repeat(4000));
  await t.unary('Unary', undefined, { metadata });
}

async function slow_reader(t) {
  const call = t.client.makeServerStreamRequest('/test.Echo/ServerStream', (v) => v, (v) => v, Buffer.from('300 100000'));
  await sleep(300);
  let number = 0;
  for await (const answer of call) {
    await t.unary('Unary', Buffer.from('a'));
    check(answer.length === 100000 && answer[0] === (number++ & 0xff), 'message', number);
  }
  check(number === 300, number, 'messages');
}

async function many_channels(t) {
  await together(50, async () => {
    const client = t.connect();
    for (let number = 0; number < 10; number++) await t.unary('Unary', Buffer.from('a'), { client });
    client.close();
  });
}

async function keepalive_kept(t) {
  t.client = t.connect({ 'grpc.keepalive_time_ms': 500, 'grpc.keepalive_timeout_ms': 1000 });
  const talk = t.stream('/test.Echo/BidiStream');
  for (let round = 0; round < 2; round++) {
    await talk.echoed(Buffer.from('a'));
    await sleep(3000);
  }
  await talk.echoed(Buffer.from('b'));
}

async function keepalive_punished(t) {
  t.client = t.connect({ 'grpc.keepalive_time_ms': 100, 'grpc.keepalive_timeout_ms': 5000 });
  const talk = t.stream('/test.Echo/BidiStream', { timeoutMs: 10000 });
  await talk.echoed(Buffer.from('a'));
  const end = await talk.status();
  check([status.UNAVAILABLE, status.RESOURCE_EXHAUSTED, status.INTERNAL].includes(end.code), end.code, end.details);
}

// Pauses between calls for longer and longer, until the server has closed the connection between two of them.
async function idle(t) {
  for (let pause = 0; pause < 12; pause++) {
    await t.unary('Unary');
    await sleep(pause * 150);
  }
}

async function refused(t) {
  const error = await t.failure('Unary', undefined, { timeoutMs: 3000 });
  check(error.code === status.UNAVAILABLE, error);
}

// Calls, eight at a time, until standard input ends; no call may fail. With "path" and "request" (in hexadecimal) it calls
// another method, and does not look at the answer.
async function load(t) {
  let isOver = false;
  let answered = 0;
  const errors = {};
  process.stdin.on('end', () => { isOver = true; }).resume();
  const { path, request: fixed = '' } = t.arguments;
  const metadata = new grpc.Metadata({ waitForReady: true });
  await together(8, async (index) => {
    for (let number = 0; !isOver; number++) {
      const request = path ? Buffer.from(fixed, 'hex') : Buffer.alloc(50, index * 16 + (number & 0xf));
      try {
        const answer = await t.unary(path || 'Unary', request, { metadata });
        check(path || request.equals(answer), "another's answer");
      } catch (error) {
        errors[error] = (errors[error] || 0) + 1;
      }
      if (++answered === 100) console.log('running');
    }
  });
  console.log(answered, 'calls');
  check(!Object.keys(errors).length, 'of', answered, 'calls:', JSON.stringify(errors));
}

module.exports = {
  unary, client_stream, server_stream, ping_pong, empty_stream, first_word, early_end, deadline, deadline_stream, cancel,
  cancel_before_messages, cancel_after_answer, metadata, metadata_stream, status_codes, status_stream, unimplemented, gzip,
  big, too_large, concurrent_streams, concurrent_large, few_streams, ten_thousand, large_headers, slow_reader,
  many_channels, keepalive_kept, keepalive_punished, idle, refused, load,
};
