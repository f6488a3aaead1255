package proxybench

import (
	"bytes"
	"fmt"
	"strings"
)

// modelName is the one model that is served.
const modelName = "bench/model-8b"

// A request is one that is sent many times, each time with another number in its X-Bench field and at the
// beginning of its prompt, so that no two prompts begin alike: a gateway that remembers prompts has them all to learn.
type request struct {
	bytes    []byte
	tagAt    int // eight hexadecimal digits: the client's number
	promptAt int // sixteen: the request's
}

// newTemplate makes a chat completion request whose body has about the given size.
func newRequest(host string, bodyBytes int, stream, closing bool) *request {
	const mark = "0000000000000000"
	options := ""
	if stream {
		options = `,"stream":true,"stream_options":{"include_usage":true}`
	}
	body := `{"model":"` + modelName + `","messages":[{"role":"system","content":"` + mark + ` You are a helpful assistant."},{"role":"user","content":"%s"}],"max_tokens":64,"temperature":0.7` + options + `}`
	// Prose with a quotation and a new paragraph every 400 bytes.
	const sentence = "It was a bright cold day in the valley, and the clocks of the three churches were striking, one after the other, as they had done for longer than anybody could remember. " +
		"Nobody looked up. A cart came down the road, and the man on it called out, \\\"Is this the way to the river?\\\" before he saw that there was no one to hear him; " +
		"so he drove on, past the mill and the last of the houses, until the road was only grass.\\n\\n"
	n := max(0, bodyBytes-len(body)+2)
	text := strings.Repeat(sentence, n/len(sentence)) + strings.Repeat("x", n%len(sentence))
	body = strings.Replace(body, "%s", text, 1)
	connection := "keep-alive"
	if closing {
		connection = "close"
	}
	head := fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nUser-Agent: OpenAI/Python 1.99.1\r\nAccept: application/json\r\nAccept-Encoding: identity\r\nAuthorization: Bearer bench-key-0123456789\r\nContent-Type: application/json\r\nX-Stainless-Lang: python\r\nX-Bench: 00000000\r\nConnection: %s\r\nContent-Length: %d\r\n\r\n", host, connection, len(body))
	t := &request{bytes: append([]byte(head), body...)}
	t.tagAt = strings.Index(head, "00000000\r\n")
	t.promptAt = len(head) + strings.Index(body, mark)
	return t
}

const hexDigits = "0123456789abcdef"

// stamp puts the client's and the request's number in.
func (t *request) stamp(tag int, request uint64) []byte {
	putHex(t.bytes[t.tagAt:t.tagAt+8], uint64(tag))
	putHex(t.bytes[t.promptAt:t.promptAt+16], request*0x9e3779b97f4a7c15)
	return t.bytes
}

func putHex(b []byte, v uint64) {
	for i := len(b) - 1; i >= 0; i-- {
		b[i] = hexDigits[v&15]
		v >>= 4
	}
}

// answers are what the model server sends.
type answers struct {
	plain       []byte // a whole answer of some hundred bytes
	first       []byte // head and first chunk of a stream
	chunk, last []byte // a further chunk; the last one with the end of the stream
	models      []byte
	health      []byte
	metrics     []byte
	missing     []byte
}

// payload is how many bytes of body an answer has.
func (a *answers) payload(chunks int, stream bool) int64 {
	if !stream {
		return int64(len(a.plain) - bytes.Index(a.plain, headEnd) - len(headEnd))
	}
	first := a.first[bytes.Index(a.first, headEnd)+len(headEnd):]
	return unchunked(first) + int64(chunks-2)*unchunked(a.chunk) + unchunked(a.last)
}

// unchunked is how many bytes a series of chunks carries.
func unchunked(b []byte) int64 {
	p := parser{state: parseChunkSize}
	_, _, _ = p.feed(b)
	return p.payload
}

func response(kind, body string) []byte {
	return fmt.Appendf(nil, "HTTP/1.1 200 OK\r\ndate: Mon, 05 Jan 2026 10:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\ncontent-type: %s\r\n\r\n%s", len(body), kind, body)
}

func chunk(s string) []byte { return fmt.Appendf(nil, "%x\r\n%s\r\n", len(s), s) }

// newAnswers makes them; pageBytes is the size of a page of metrics, at least the series that matter.
func newAnswers(pageBytes int) *answers {
	const usage = `"usage":{"prompt_tokens":220,"total_tokens":284,"completion_tokens":64,"prompt_tokens_details":null}`
	const event = `data: {"id":"chatcmpl-6f1d2c3b4a5968778695a4b3c2d1e0f0","object":"chat.completion.chunk","created":1767607200,"model":"` + modelName + `","choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}]}` + "\n\n"
	content := fmt.Sprintf(event, `{"content":" token"}`, "null")
	a := &answers{
		plain: response("application/json", `{"id":"chatcmpl-6f1d2c3b4a5968778695a4b3c2d1e0f0","object":"chat.completion","created":1767607200,"model":"`+modelName+
			`","choices":[{"index":0,"message":{"role":"assistant","reasoning_content":null,"content":"`+strings.Repeat("The quick brown fox. ", 20)+
			`","tool_calls":[]},"logprobs":null,"finish_reason":"stop","stop_reason":null}],`+usage+`,"prompt_logprobs":null,"kv_transfer_params":null}`),
		chunk:   chunk(content),
		models:  response("application/json", `{"object":"list","data":[{"id":"`+modelName+`","object":"model","created":1767607200,"owned_by":"vllm","root":"`+modelName+`","parent":null,"max_model_len":4000000}]}`),
		health:  response("text/plain", ""),
		missing: []byte("HTTP/1.1 404 Not Found\r\ncontent-length: 22\r\ncontent-type: application/json\r\n\r\n{\"detail\":\"Not Found\"}"),
	}
	a.first = append([]byte("HTTP/1.1 200 OK\r\ndate: Mon, 05 Jan 2026 10:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"),
		chunk(fmt.Sprintf(event, `{"role":"assistant","content":""}`, "null"))...)
	a.last = bytes.Join([][]byte{
		chunk(fmt.Sprintf(event, `{"content":""}`, `"stop"`)),
		chunk(`data: {"id":"chatcmpl-6f1d2c3b4a5968778695a4b3c2d1e0f0","object":"chat.completion.chunk","created":1767607200,"model":"` + modelName + `","choices":[],` + usage + "}\n\ndata: [DONE]\n\n"),
		[]byte("0\r\n\r\n"),
	}, nil)
	a.metrics = response("text/plain; version=0.0.4; charset=utf-8", metricsPage(pageBytes))
	return a
}

// metricsPage is a page as vLLM writes it, filled up to size with histograms as it has many.
func metricsPage(size int) string {
	var b strings.Builder
	line := func(name, kind, labels, value string) {
		fmt.Fprintf(&b, "# HELP vllm:%[1]s Of the engine.\n# TYPE vllm:%[1]s %[2]s\nvllm:%[1]s{engine=\"0\",model_name=\"%[3]s\"%[4]s} %[5]s\n", name, kind, modelName, labels, value)
	}
	// A static page: any load on it would be that of others, for which kvgate reads pages more often.
	line("num_requests_running", "gauge", "", "0.0")
	line("num_requests_waiting", "gauge", "", "0.0")
	line("kv_cache_usage_perc", "gauge", "", "0.1")
	line("prefix_cache_queries_total", "counter", "", "1000000.0")
	line("prefix_cache_hits_total", "counter", "", "300000.0")
	line("cache_config_info", "gauge", `,block_size="16",num_gpu_blocks="400000",gpu_memory_utilization="0.9"`, "1.0")
	for i := 0; b.Len() < size; i++ {
		fmt.Fprintf(&b, "# HELP vllm:stage_%[1]d_seconds Time in stage %[1]d.\n# TYPE vllm:stage_%[1]d_seconds histogram\n", i)
		for le := range 20 {
			fmt.Fprintf(&b, "vllm:stage_%d_seconds_bucket{engine=\"0\",le=\"%d.0\",model_name=\"%s\"} %d.0\n", i, le, modelName, 1000*le)
		}
		fmt.Fprintf(&b, "vllm:stage_%[1]d_seconds_count{engine=\"0\",model_name=\"%[2]s\"} 20000.0\nvllm:stage_%[1]d_seconds_sum{engine=\"0\",model_name=\"%[2]s\"} 12345.6\n", i, modelName)
	}
	return b.String()
}
