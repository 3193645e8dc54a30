// A gRPC client on Node for tests of servers: client.js PROTOS CASE NAME=VALUE...
//
// Status 0: the case holds. 77: this client cannot do it, the reason is on standard error. Otherwise it does not hold.
'use strict';

const fs = require('fs');
const grpc = require('@grpc/grpc-js');

const bytes = (value) => value;

function check(holds, ...words) {
  if (!holds) throw new Error(words.join(' '));
}

// One run: its arguments, and a connection.
class Test {
  constructor(protos, pairs) {
    this.protos = protos;
    this.arguments = Object.fromEntries(pairs.map((pair) => pair.split(/=(.*)/s)));
    this.client = this.connect();
  }

  options(more) {
    return {
      'grpc.max_receive_message_length': 64 << 20, 'grpc.max_send_message_length': -1,
      'grpc.ssl_target_name_override': 'localhost', 'grpc.use_local_subchannel_pool': 1, ...more,
    };
  }

  credentials() {
    const { ca, cert, key } = this.arguments;
    if (!ca) return grpc.credentials.createInsecure();
    const pair = cert ? [fs.readFileSync(key), fs.readFileSync(cert)] : [null, null];
    return grpc.credentials.createSsl(fs.readFileSync(ca), ...pair);
  }

  connect(more = {}) {
    return new grpc.Client(this.arguments.address, this.credentials(), this.options(more));
  }

  // A unary call; fails with the error, which has code, details and metadata.
  unary(method, request = Buffer.alloc(0), { metadata = new grpc.Metadata(), timeoutMs = 30000, client = this.client,
    onCall = () => {} } = {}) {
    const path = method.startsWith('/') ? method : `/test.Echo/${method}`;
    return new Promise((resolve, reject) => {
      onCall(client.makeUnaryRequest(path, bytes, bytes, request, metadata, { deadline: Date.now() + timeoutMs },
        (error, answer) => (error ? reject(error) : resolve(answer))));
    });
  }

  async failure(...call) {
    try {
      await this.unary(...call);
    } catch (error) {
      return error;
    }
    throw new Error('it did not fail');
  }

  stream(path, { metadata = new grpc.Metadata(), timeoutMs = 30000 } = {}) {
    return new Talk(this.client.makeBidiStreamRequest(path, bytes, bytes, metadata, { deadline: Date.now() + timeoutMs }));
  }

  async stats() {
    return JSON.parse(await this.unary('Stats'));
  }

  async await(what, isSo) {
    for (const end = Date.now() + 10000; ;) {
      const found = await this.stats();
      if (isSo(found)) return;
      check(Date.now() < end, what, JSON.stringify(found));
      await sleep(5);
    }
  }
}

// A call of any form: what comes can be waited for.
class Talk {
  constructor(call) {
    this.call = call;
    this.events = [];
    this.wake = () => {};
    const push = (event) => { this.events.push(event); this.wake(); };
    this.metadata = new Promise((resolve) => { call.on('metadata', resolve); });
    call.on('data', (data) => push({ data }));
    call.on('end', () => {});
    call.on('error', () => {});
    call.on('status', (status) => push({ status }));
  }

  async next() {
    while (!this.events.length) await new Promise((resolve) => { this.wake = resolve; });
    return this.events.shift();
  }

  async recv() {
    const event = await this.next();
    check(event.data, 'ended:', JSON.stringify(event.status));
    return event.data;
  }

  async status() {
    const event = await this.next();
    check(event.status, 'another message');
    return event.status;
  }

  async echoed(message) {
    this.call.write(message);
    check(message.equals(await this.recv()), 'another message came back');
  }
}

const sleep = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

module.exports = { Test, check, grpc, sleep };

async function main() {
  const [protos, name, ...pairs] = process.argv.slice(2);
  const run = { ...require('./calls'), ...require('./model') }[name];
  if (!run) {
    console.error('this client has no such case');
    process.exit(77);
  }
  await run(new Test(protos, pairs));
}

if (require.main === module) {
  main().then(() => process.exit(0), (error) => { console.error(error); process.exit(1); });
}
