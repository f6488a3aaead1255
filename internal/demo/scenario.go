package demo

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"kvgate/internal/modelsim"
)

// The fleet: two base models on two servers each. The simulated GPU is a small one, so that a few requests a second are
// a load; times are real, not sped up.
const (
	llama = "meta-llama/Llama-3.1-8B-Instruct"
	qwen  = "Qwen/Qwen3-8B"

	profile  = "8b-rtx4090"
	maxLoras = 3    // adapters that fit into one batch of a qwen server
	fullness = 0.92 // of llama-2's KV cache, kept in use by others
)

// adapters of the qwen servers, the most asked for first.
var adapters = []string{"sql", "support", "summaries", "legal", "poetry", "triage"}

// A gpu is one server of the fleet.
type gpu struct {
	name, pool string
	options    modelsim.Options
	fill       float64
}

func fleet(seed uint64) []gpu {
	base := modelsim.Options{Profile: profile, Models: []string{llama}, EndsEarly: false, Seed: seed}
	lora := base
	lora.Models, lora.Adapters, lora.MaxLoras, lora.MaxCPULoras = []string{qwen}, adapters, maxLoras, maxLoras
	return []gpu{
		{"llama-1", "llama", base, 0},
		{"llama-2", "llama", base, fullness},
		{"qwen-1", "qwen", lora, 0},
		{"qwen-2", "qwen", lora, 0},
	}
}

// A call is one chat request that a client makes.
type call struct {
	id   string
	at   time.Duration // after the start of the run
	body []byte
}

// calls makes the traffic: the same for every policy. Arrivals are a Poisson process; prompts are of very different
// lengths, as people's are, and begin with the instructions of the application that they come from.
func calls(seed uint64, length time.Duration, perSecond float64) []call {
	r := rand.New(rand.NewPCG(seed, 1))
	var out []call
	for at := exponential(r, perSecond); at < length; at += exponential(r, perSecond) {
		n := len(out) + 1
		model, app := llama, fmt.Sprintf("assistant %d", r.IntN(3))
		if r.Float64() < 0.5 {
			model = adapters[popular(r, len(adapters))]
			app = model
		}
		prompt := 150 + int(900*math.Exp(0.9*r.NormFloat64()-0.4))
		prompt = min(prompt, 6000)
		output := 30 + r.IntN(130)
		body, err := json.Marshal(map[string]any{
			"model": model, "stream": true, "max_tokens": output,
			"messages": []map[string]string{
				{"role": "system", "content": text(rand.New(rand.NewPCG(hash(app), 2)), 300)},
				{"role": "user", "content": text(rand.New(rand.NewPCG(seed, uint64(n)+1000)), prompt)},
			},
		})
		if err != nil {
			panic("BUG: " + err.Error())
		}
		out = append(out, call{fmt.Sprintf("demo-%d", n), at, body})
	}
	return out
}

func exponential(r *rand.Rand, perSecond float64) time.Duration {
	return time.Duration(r.ExpFloat64() / perSecond * float64(time.Second))
}

// popular draws from n choices with weights 1/3, 1/4, 1/5, …
func popular(r *rand.Rand, n int) int {
	sum := 0.0
	for i := range n {
		sum += 1 / float64(i+3)
	}
	x := r.Float64() * sum
	for i := range n {
		if x -= 1 / float64(i+3); x < 0 {
			return i
		}
	}
	return n - 1
}

func hash(s string) (h uint64) {
	for _, c := range []byte(s) {
		h = h*1099511628211 + uint64(c)
	}
	return h
}

var words = strings.Fields("the of and to in is that for with on as at by from this are was will can may more when which their about " +
	"server model token cache memory request answer question table number time light water paper music river city winter garden " +
	"bread letter window morning system report budget travel price order account ticket policy network storage engine")

// text is about n tokens of words, at four bytes a token.
func text(r *rand.Rand, n int) string {
	var b strings.Builder
	for b.Len() < 4*n {
		b.WriteString(words[r.IntN(len(words))])
		b.WriteByte(' ')
	}
	return b.String()
}
