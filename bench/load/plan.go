package load

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/zeebo/xxh3"
)

// A conversation is what one user asks in turn. It depends on its number and the seed alone, so that both targets of a
// comparison get the same ones.
type conversation struct {
	number int
	model  string
	prefix int // -1: none
	turns  []turn
}

type turn struct {
	input, output int // tokens
	think         time.Duration
}

func (r *run) conversation(number int) conversation {
	o := &r.o
	rnd := rand.New(rand.NewPCG(o.Seed, uint64(number)))
	c := conversation{number: number, model: o.Model, prefix: -1}
	if len(o.Adapters) > 0 {
		c.model = o.Adapters[r.adapters.draw(rnd)]
	}
	if o.Prefixes > 0 {
		c.prefix = r.prefixes.draw(rnd)
	}
	c.turns = make([]turn, o.Turns.whole(rnd, 1))
	for i := range c.turns {
		c.turns[i] = turn{o.Input.whole(rnd, 1), o.Output.whole(rnd, 1), time.Duration(o.Think.Draw(rnd) * float64(time.Second))}
	}
	return c
}

// arrivals returns the times at which conversations begin. Their rate is such that the requests of all turns come at o.Rate.
func (r *run) arrivals(stream uint64) func() time.Duration {
	o := &r.o
	rnd := rand.New(rand.NewPCG(o.Seed, 0xa77<<32|stream))
	gap := o.Turns.meanWhole(1) / o.Rate
	n, at := 0, 0.0
	return func() time.Duration {
		switch o.Arrival {
		case "poisson":
			at += rnd.ExpFloat64() * gap
		case "constant":
			at = float64(n) * gap
		case "burst":
			at = float64(n/o.Burst*o.Burst) * gap
		}
		n++
		return time.Duration(at * float64(time.Second))
	}
}

// words are short and common, so that each, with the space before it, is about one token in any tokenizer for English.
var words = strings.Fields(`the and for are but not you all any can had her was one our out day get has him his how man new now old see
	two way who boy did its let put say she too use air act age ago arm art ask bad bag ball bank base bear beat bed best big bit
	blue boat body book both box bring build buy call came car care case cat cell chair city cold come cost cup cut dark data deal
	deep door down draw drive dry eat edge end even eye face fact fall far fast feel few field fill film fire fish five floor fly
	food form four free full game gas girl give glass go gold good gray green group grow half hand hard hat head hear heat help
	high hill hold home hope hot hour ice idea job join keep key kind king land last late law lead left leg less life light line
	list live long look lot love low main map mark mean meet mile milk mind moon more most move much music name near need next
	nice night nine north note oil open page part pass path pay plan play point poor pull push rain read real red rest rich ride
	ring rise road rock room rule run safe salt sand sea seat seed sell send ship shop short show side sign sing six size skin sky
	slow small snow soft some song soon sort south stand star stay step stone stop sun sure take talk tall team tell ten test time
	top town tree true turn type view wait walk wall warm wash watch water week west wide wild wind wish wood word work year`)

// text is n words, the same for the same seeds.
func text(b *strings.Builder, n int, seed, stream uint64) {
	rnd := rand.New(rand.NewPCG(seed, stream))
	for i := range n {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(words[rnd.IntN(len(words))])
	}
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// A dialogue is one conversation as it goes on with one target. Its words differ between targets and runs from the first
// on: caches are of prefixes, so nothing that one target or run has computed is of use to another.
type dialogue struct {
	o        *Options
	c        *conversation
	salt     string
	seed     uint64 // of words
	messages []message
}

func (r *run) dialogue(c *conversation, target int) *dialogue {
	salt := fmt.Sprintf("[%s %d] ", r.o.Salt, target+1)
	d := &dialogue{o: &r.o, c: c, salt: salt, seed: xxh3.HashString(salt) ^ r.o.Seed}
	if c.prefix >= 0 {
		rnd := rand.New(rand.NewPCG(r.o.Seed, 1<<63|uint64(c.prefix)))
		var b strings.Builder
		b.WriteString(salt)
		text(&b, r.o.PrefixTokens.whole(rnd, 1), d.seed, 1<<63|uint64(c.prefix))
		d.messages = append(d.messages, message{"system", b.String()})
	}
	return d
}

// body is the request of turn i.
func (d *dialogue) body(i int) ([]byte, error) {
	t := &d.c.turns[i]
	var b strings.Builder
	if len(d.messages) == 0 {
		b.WriteString(d.salt)
	}
	text(&b, t.input, d.seed, uint64(d.c.number)<<16|uint64(i))
	d.messages = append(d.messages, message{"user", b.String()})
	body := map[string]any{"model": d.c.model, "max_tokens": t.output}
	if d.o.API == "chat" {
		body["messages"] = d.messages
	} else {
		var prompt strings.Builder
		for i, m := range d.messages {
			if i > 0 {
				prompt.WriteByte('\n')
			}
			prompt.WriteString(m.Content)
		}
		body["prompt"] = prompt.String()
	}
	if d.o.Stream {
		body["stream"] = true
		if !d.o.NoUsage {
			body["stream_options"] = map[string]any{"include_usage": true}
		}
	}
	maps.Copy(body, d.o.Extra)
	return json.Marshal(body)
}

// answered adds an answer, for the next turn to begin with.
func (d *dialogue) answered(text string) {
	d.messages = append(d.messages, message{"assistant", text})
}
