package cli

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"

	"kvgate/config"
	"kvgate/internal/gateway"
)

// pages returns README.md and the pages in docs by name.
func pages(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	read := func(name string) {
		b, err := os.ReadFile(filepath.Join("../..", name))
		if err != nil {
			t.Fatal(err)
		}
		out[name] = string(b)
	}
	read("README.md")
	err := fs.WalkDir(os.DirFS("../.."), "docs", func(name string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(name, ".md") {
			read(name)
		}
		return err
	})
	if err != nil || len(out) < 10 {
		t.Fatalf("%d pages, %v", len(out), err)
	}
	return out
}

// A fence is one fenced block of a page.
type fence struct{ place, language, text string }

var fenceLine = regexp.MustCompile("^ *```([a-z]*)")

func fences(name, page string) (out []fence) {
	open := false
	for i, line := range strings.Split(page, "\n") {
		switch m := fenceLine.FindStringSubmatch(line); {
		case m != nil && open:
			open = false
		case m != nil:
			open = true
			out = append(out, fence{place: name + ":" + strconv.Itoa(i+1), language: m[1]})
		case open:
			out[len(out)-1].text += line + "\n"
		}
	}
	return out
}

// Every command of ours in the documentation exists, with its flags and arguments.
func TestDocumentedCommands(t *testing.T) {
	n := 0
	for name, page := range pages(t) {
		for _, f := range fences(name, page) {
			if f.language != "" && f.language != "sh" {
				continue
			}
			for line := range strings.SplitSeq(strings.ReplaceAll(f.text, "\\\n", " "), "\n") {
				for _, words := range ours(line) {
					n++
					if err := parses(words); err != nil {
						t.Errorf("%s: %s: %v", f.place, strings.Join(words, " "), err)
					}
				}
			}
		}
	}
	if n < 20 {
		t.Errorf("only %d commands were found in the documentation", n)
	}
}

// ours returns the words behind kvgate of each call of it in a line of shell.
func ours(line string) (calls [][]string) {
	var words []string
	flush := func() {
		for len(words) > 0 && (strings.Contains(words[0], "=") || words[0] == "sudo" || words[0] == "$" || words[0] == "exec") {
			words = words[1:]
		}
		if len(words) > 0 && (words[0] == "kvgate" || words[0] == "./kvgate") {
			calls = append(calls, words[1:])
		}
		words = nil
	}
	var word strings.Builder
	inWord := false
	quote := rune(0)
	end := func() {
		if inWord {
			words = append(words, word.String())
		}
		word.Reset()
		inWord = false
	}
	for _, c := range line {
		switch {
		case quote != 0 && c == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(c)
		case c == '\'' || c == '"':
			quote, inWord = c, true
		case c == '#' && !inWord:
			flush()
			return calls
		case strings.ContainsRune("|;&<>()", c):
			end()
			if c != '<' && c != '>' {
				flush()
			} else {
				words = append(words, string(c)) // what follows is a file's name
			}
		case c == ' ' || c == '\t':
			end()
		default:
			inWord = true
			word.WriteRune(c)
		}
	}
	end()
	flush()
	return calls
}

// parses reports why a call would be refused before it does anything.
func parses(words []string) error {
	for i, w := range words {
		if w == "<" || w == ">" {
			words = words[:i]
			break
		}
	}
	root := newRoot(&env{})
	c, rest, err := root.Find(words)
	if err != nil {
		return err
	}
	if err := unknownCommand(root, words); err != nil {
		return err
	}
	if err := c.ParseFlags(rest); err != nil {
		return err
	}
	if help, _ := c.Flags().GetBool("help"); help || c.Args == nil {
		return nil
	}
	return c.Args(c, c.Flags().Args())
}

// Every configuration in the documentation is one, or a part of one.
func TestDocumentedConfigurations(t *testing.T) {
	t.Setenv("VLLM_API_KEY", "test")
	t.Setenv("BILLING_TOKEN", "test")
	t.Setenv("REDIS_PASSWORD", "test")
	n := 0
	for name, page := range pages(t) {
		for _, f := range fences(name, page) {
			if f.language != "yaml" {
				continue
			}
			n++
			if err := configures(t, f.text); err != nil {
				t.Errorf("%s: %v", f.place, err)
			}
		}
	}
	if n < 3 {
		t.Errorf("only %d configurations were found in the documentation", n)
	}
}

const somePool = "  - name: p\n    discovery: {static: [\"http://127.0.0.1:8000\"]}\n"

// configures loads text as a whole file, else as what stands beside the pools, else as a part of a pool.
func configures(t *testing.T, text string) error {
	var keys map[string]any
	if err := yaml.Unmarshal([]byte(text), &keys); err != nil {
		return err
	}
	if keys["kind"] != nil && keys["apiVersion"] != nil || keys["groups"] != nil {
		return nil // Kubernetes' or Prometheus'
	}
	if _, ok := keys["keys"].([]any); ok { // a file of keys
		_, err := config.ParseKeys("keys.yaml", []byte(text), gateway.ConfigOptions())
		return err
	}
	err := loads(t, text)
	if _, whole := keys["pools"]; whole || err == nil {
		return err
	}
	if loads(t, text+"\npools:\n"+somePool) == nil {
		return nil
	}
	by := len(text) - len(strings.TrimLeft(text, " ")) // indented like the place it belongs to
	var part strings.Builder
	for line := range strings.Lines(text) {
		part.WriteString("    " + line[min(by, len(line)-1):])
	}
	return loads(t, "pools:\n"+somePool+part.String())
}

func loads(t *testing.T, text string) error {
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	const keys = "keys:\n  - {id: a, hash: \"sha256:48c76782dcb06028342d947b90d1cbb7ac1de148a6fa7beee380855c5b525320\", tenant: a}\n"
	if err := os.WriteFile(filepath.Join(filepath.Dir(file), "keys.yaml"), []byte(keys), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := config.Load(file, gateway.ConfigOptions())
	return err
}
