// Cases on the V2 protocol, health and what is listed beside it.
'use strict';

const path = require('path');
const loader = require('@grpc/proto-loader');
const { check, grpc } = require('./client');

const { status } = grpc;

function inference(t, more = {}) {
  const definition = loader.loadSync(path.join(t.protos, 'grpc_service.proto'), { keepCase: true, includeDirs: [t.protos] });
  const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
  return new GRPCInferenceService(t.arguments.address, t.credentials(), t.options(more));
}

const call = (client, method, request) => new Promise((resolve, reject) => {
  client[method](request, { deadline: Date.now() + 30000 }, (error, answer) => (error ? reject(error) : resolve(answer)));
});

function asked(name, value, length) {
  return {
    model_name: name,
    id: `request ${value}`,
    inputs: [{ name: 'INPUT0', datatype: 'UINT8', shape: [length] }],
    raw_input_contents: [Buffer.alloc(length, value)],
  };
}

function answers(answer, request) {
  check(answer.id === request.id && answer.outputs[0].name === 'OUTPUT0', answer.id);
  check(answer.raw_output_contents[0].equals(request.raw_input_contents[0]), 'another tensor');
}

async function model(t) {
  const client = inference(t);
  check((await call(client, 'ServerLive', {})).live);
  check((await call(client, 'ModelReady', { name: 'echo' })).ready);
  check((await call(client, 'ModelMetadata', { name: 'echo' })).inputs[0].name === 'INPUT0');
}

async function model_infer(t) {
  for (const algorithm of [0, 2]) {
    const client = inference(t, { 'grpc.default_compression_algorithm': algorithm });
    for (let value = 1; value < 50; value++) {
      const request = asked('echo', value, 16);
      answers(await call(client, 'ModelInfer', request), request);
    }
  }
}

async function model_big(t) {
  const request = asked('echo', 7, 40000000);
  answers(await call(inference(t), 'ModelInfer', request), request);
}

async function failure(promise) {
  return promise.then(() => { throw new Error('it did not fail'); }, (error) => error);
}

async function model_error(t) {
  const client = inference(t);
  const unknown = await failure(call(client, 'ModelInfer', asked('nobody', 1, 16)));
  check(unknown.code === status.NOT_FOUND && unknown.details.includes('nobody'), unknown);
  const wrong = { ...asked('echo', 1, 16), raw_input_contents: [Buffer.alloc(15)] };
  check((await failure(call(client, 'ModelInfer', wrong))).code === status.INVALID_ARGUMENT);
}

async function model_stream(t) {
  const stream = inference(t).ModelStreamInfer({ deadline: Date.now() + 30000 });
  const answer = stream[Symbol.asyncIterator]();
  for (let value = 0; value < 20; value++) {
    const request = asked('echo', value, 16);
    stream.write(request);
    const { value: got } = await answer.next();
    check(!got.error_message, got.error_message);
    answers(got.infer_response, request);
  }
  stream.write(asked('nobody', 1, 16));
  check((await answer.next()).value.error_message.includes('nobody'));
  stream.end();
  check((await answer.next()).done);
}

// HealthCheckRequest and its response by hand: field 1 is the service's name, and the status, 1 for SERVING.
async function health(t) {
  const named = (name) => Buffer.concat([Buffer.from(name ? [10, name.length] : []), Buffer.from(name)]);
  const check_path = '/grpc.health.v1.Health/Check';
  for (const name of ['', 'inference.GRPCInferenceService']) {
    check((await t.unary(check_path, named(name))).equals(Buffer.from([8, 1])), name);
  }
  check((await t.failure(check_path, named('nobody'))).code === status.NOT_FOUND);
  const watch = t.stream('/grpc.health.v1.Health/Watch');
  watch.call.write(named(''));
  watch.call.end();
  check((await watch.recv()).equals(Buffer.from([8, 1])), 'Watch');
  watch.call.cancel();
}

module.exports = { model, model_infer, model_big, model_error, model_stream, health };
