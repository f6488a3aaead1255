// The official OpenAI SDK for JavaScript against kvgate, unmodified. Run by test/sdk/run.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.KVGATE_URL + "/v1", apiKey: "test", maxRetries: 0, timeout: 30_000 });
const model = "base-model", adapter = "sql-adapter";

test("lists models", async () => {
  const ids = [];
  for await (const m of client.models.list()) ids.push(m.id);
  assert.ok(ids.includes(model) && ids.includes(adapter), String(ids));
  assert.equal((await client.models.retrieve(adapter)).id, adapter);
});

test("chats", async () => {
  for (const name of [model, adapter]) {
    const { data, response } = await client.chat.completions
      .create({ model: name, max_tokens: 5, messages: [{ role: "user", content: "Grüße, 世界" }] })
      .withResponse();
    assert.ok(response.headers.get("x-request-id"));
    assert.equal(data.usage.completion_tokens, 5);
    assert.ok(data.choices[0].message.content);
  }
});

test("streams", async () => {
  const stream = await client.chat.completions.create({
    model, max_tokens: 8, stream: true, stream_options: { include_usage: true }, messages: [{ role: "user", content: "Hello" }],
  });
  let text = "", usage, finish;
  for await (const chunk of stream) {
    usage = chunk.usage ?? usage;
    text += chunk.choices[0]?.delta?.content ?? "";
    finish = chunk.choices[0]?.finish_reason ?? finish;
  }
  assert.ok(text);
  assert.equal(finish, "length");
  assert.equal(usage.completion_tokens, 8);
});

test("a client may leave a stream", async () => {
  const stream = await client.chat.completions.create({ model, max_tokens: 5000, stream: true, messages: [{ role: "user", content: "Hello" }] });
  for await (const chunk of stream) {
    assert.ok(chunk);
    break; // the SDK aborts the request
  }
});

test("reads errors", async () => {
  await assert.rejects(client.chat.completions.create({ model: "nobody", messages: [{ role: "user", content: "x" }] }), (err) => {
    assert.ok(err instanceof OpenAI.NotFoundError);
    assert.equal(err.code, "model_not_found");
    assert.equal(err.type, "invalid_request_error");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ messages: [] }), OpenAI.BadRequestError);
});
