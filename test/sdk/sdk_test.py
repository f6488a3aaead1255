"""The official OpenAI SDK for Python against kvgate, unmodified. Run by test/sdk/run."""

import asyncio
import os
import unittest

import openai

BASE = os.environ["KVGATE_URL"] + "/v1"
MODEL, ADAPTER = "base-model", "sql-adapter"


class SDK(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(base_url=BASE, api_key="test", max_retries=0, timeout=30)
        self.addCleanup(self.client.close)

    def test_lists_models(self):
        ids = [m.id for m in self.client.models.list()]
        self.assertIn(MODEL, ids)
        self.assertIn(ADAPTER, ids)
        self.assertEqual(self.client.models.retrieve(ADAPTER).id, ADAPTER)

    def test_chats(self):
        for model in (MODEL, ADAPTER):
            raw = self.client.chat.completions.with_raw_response.create(
                model=model, max_tokens=5, messages=[{"role": "user", "content": "Grüße, 世界"}])
            self.assertTrue(raw.headers["x-request-id"])
            answer = raw.parse()
            self.assertEqual(answer.choices[0].finish_reason, "length")
            self.assertEqual(answer.usage.completion_tokens, 5)
            self.assertTrue(answer.choices[0].message.content)

    def test_streams(self):
        stream = self.client.chat.completions.create(
            model=MODEL, max_tokens=8, stream=True, stream_options={"include_usage": True},
            messages=[{"role": "user", "content": "Hello"}])
        text, usage, finish = "", None, None
        for chunk in stream:
            if chunk.usage:
                usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        self.assertTrue(text)
        self.assertEqual(finish, "length")
        self.assertEqual(usage.completion_tokens, 8)

    def test_streams_async(self):
        async def run():
            async with openai.AsyncOpenAI(base_url=BASE, api_key="test", max_retries=0) as client:
                async def one(i):
                    text = ""
                    stream = await client.chat.completions.create(
                        model=MODEL, max_tokens=4, stream=True, messages=[{"role": "user", "content": f"number {i}"}])
                    async for chunk in stream:
                        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                    return text
                return await asyncio.gather(*(one(i) for i in range(20)))
        self.assertTrue(all(asyncio.run(run())))

    def test_completes(self):
        answer = self.client.completions.create(model=MODEL, prompt="Once", max_tokens=3)
        self.assertEqual(answer.usage.completion_tokens, 3)

    def test_reads_errors(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
        self.assertEqual(caught.exception.code, "model_not_found")
        self.assertEqual(caught.exception.type, "invalid_request_error")
        self.assertIn("nobody", str(caught.exception))
        with self.assertRaises(openai.BadRequestError):
            self.client.chat.completions.create(model=None, messages=[])


if __name__ == "__main__":
    unittest.main(verbosity=2)
