// Package cli is kvgate's command line, on cobra, one file per command. Standard output carries what was asked for,
// standard error everything else. It wires other packages together and must hold no logic that they could use.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Exit codes.
const (
	exitOK       = 0
	exitFailed   = 1
	exitUsage    = 2
	exitWarnings = 3 // check --strict
	exitForced   = 4 // a second signal ended the drain
)

// exitHelp are the exit codes that a command can have; root tells of all.
func exitHelp(c *cobra.Command) string {
	b := "Exit codes:\n  0  it worked\n  1  it failed; the reason is on standard error\n  2  the command line was wrong"
	if all := c == c.Root(); all || c.Name() == "check" {
		b += "\n  3  check --strict found warnings"
	}
	if all := c == c.Root(); all || c.Name() == "serve" {
		b += "\n  4  serve was told to stop twice and cut off what was still running"
	}
	return b
}

// env is what a command may touch of the world.
type env struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	lookup         func(string) (string, bool)
}

// Main runs the command line args, without the program's name, and returns the exit code.
func Main(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	out := &checkedWriter{w: stdout}
	e := &env{stdin: stdin, stdout: out, stderr: stderr, lookup: os.LookupEnv}
	root := newRoot(e)
	root.SetArgs(args)
	err := unknownCommand(root, args)
	if err == nil {
		err = root.ExecuteContext(context.Background())
	}
	if err == nil {
		err = out.failed()
	}
	return report(stderr, err)
}

// A checkedWriter remembers that a write failed, so that commands need not look at each: what was asked for and could
// not be printed is a failure. It is safe for concurrent use: the demo prints from the goroutines that serve requests.
type checkedWriter struct {
	mu  sync.Mutex
	w   io.Writer
	err error
}

func (c *checkedWriter) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, err := c.w.Write(p)
	if c.err == nil {
		c.err = err
	}
	return n, err
}

// failed returns the first error of writing.
func (c *checkedWriter) failed() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// report prints err once and returns its exit code.
func report(w io.Writer, err error) int {
	if err == nil {
		return exitOK
	}
	code := exitFailed
	if ex, ok := errors.AsType[exitError](err); ok {
		code = ex.code
		if ex.err == nil {
			return code
		}
	}
	fmt.Fprintf(w, "kvgate: %v\n", err)
	if t, ok := errors.AsType[tryError](err); ok {
		fmt.Fprintf(w, "try: %s\n", t.try)
	}
	return code
}

// An exitError ends the program with a code of its own; a nil err has been printed already.
type exitError struct {
	code int
	err  error
}

func (e exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e exitError) Unwrap() error { return e.err }

// A tryError names the next step.
type tryError struct {
	err error
	try string
}

func (e tryError) Error() string { return e.err.Error() }
func (e tryError) Unwrap() error { return e.err }

// withTry adds a next step to err.
func withTry(err error, format string, args ...any) error {
	return tryError{err, fmt.Sprintf(format, args...)}
}

// usage is an error in the command line.
func usage(try, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	if try != "" {
		err = tryError{err, try}
	}
	return exitError{exitUsage, err}
}

func newRoot(e *env) *cobra.Command {
	root := &cobra.Command{
		Use:   "kvgate COMMAND",
		Short: "An inference gateway: sends each request to the model server that will answer it soonest",
		Long: `kvgate stands in front of LLM model servers and sends each OpenAI-style request to the server that
already holds the adapter, already holds the prompt's prefix and has room in its KV cache for the answer.`,
		Example: `  kvgate demo                       # see it work: no GPU, no configuration
  kvgate serve -c config.yaml
  kvgate check --probe config.yaml`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.ArbitraryArgs,
		RunE:          helpOrUnknown,
	}
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetHelpCommand(newHelp())
	root.Version = versionLine()
	root.SetVersionTemplate("{{.Version}}\n")
	root.Flags().BoolP("version", "v", false, "print which kvgate this is")
	root.SetIn(e.stdin)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(commands(e)...)
	root.SetUsageTemplate(usageTemplate)
	root.SetHelpTemplate("{{with (or .Long .Short)}}{{. | trimTrailingWhitespaces}}{{end}}\n\n{{.UsageString}}")
	cobra.AddTemplateFunc("exitHelp", exitHelp)
	cobra.AddTemplateFunc("exitCodes", func(c *cobra.Command) bool {
		return c == c.Root() || slices.Contains([]string{"serve", "check"}, c.Name())
	})
	each(root, func(c *cobra.Command) {
		c.DisableFlagsInUseLine = true
		c.Flags().BoolP("help", "h", false, "show this help")
		c.Flags().SortFlags = false
		pre := c.PreRunE
		c.PreRunE = func(c *cobra.Command, args []string) error {
			if err := fromEnvironment(c, e.lookup); err != nil {
				return err
			}
			if pre != nil {
				return pre(c, args)
			}
			return nil
		}
	})
	return root
}

func each(c *cobra.Command, fn func(*cobra.Command)) {
	fn(c)
	for _, sub := range c.Commands() {
		each(sub, fn)
	}
}

const usageTemplate = `Usage:
  {{if .Runnable}}{{.UseLine}}{{else}}{{.CommandPath}} COMMAND{{end}}{{if gt (len .Aliases) 0}}

Aliases:
  {{.NameAndAliases}}{{end}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}

Commands:{{range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding }} {{.Short}}{{end}}{{end}}{{end}}{{if .HasAvailableLocalFlags}}

Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}{{- if exitCodes .}}

{{exitHelp .}}{{end}}
`

// helpOrUnknown runs commands that only have subcommands.
func helpOrUnknown(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return c.Help()
	}
	return notACommand(c, args[0])
}

// unknownCommand looks at the first word before flags are parsed, so that `kvgate serv -c x` complains of the command
// and not of the flag.
func unknownCommand(root *cobra.Command, args []string) error {
	if len(args) == 0 || strings.HasPrefix(args[0], "-") || strings.HasPrefix(args[0], "__") {
		return nil
	}
	if args[0] == "help" {
		c, rest, err := root.Find(args[1:])
		if len(rest) > 0 || err != nil {
			return notACommand(c, args[len(args)-max(1, len(rest))])
		}
		root.SetArgs(append(strings.Fields(c.CommandPath())[1:], "--help"))
		return nil
	}
	c, _, _ := root.Find(args[:1])
	if c == root {
		return notACommand(root, args[0])
	}
	return nil
}

func notACommand(c *cobra.Command, word string) error {
	c.SuggestionsMinimumDistance = 2
	if s := c.SuggestionsFor(word); len(s) > 0 {
		return usage(c.CommandPath()+" "+s[0], "unknown command %q for %q", word, c.CommandPath())
	}
	return usage(c.CommandPath()+" --help", "unknown command %q for %q", word, c.CommandPath())
}

// newHelp is `kvgate help COMMAND`; unknownCommand has turned it into --help before it could run.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:     "help [COMMAND]",
		Short:   "Show the help of a command",
		Example: "  kvgate help serve",
		ValidArgsFunction: func(c *cobra.Command, args []string, _ string) (out []string, _ cobra.ShellCompDirective) {
			if at, _, err := c.Root().Find(args); err == nil {
				for _, sub := range at.Commands() {
					if sub.IsAvailableCommand() {
						out = append(out, sub.Name()+"\t"+sub.Short)
					}
				}
			}
			return out, cobra.ShellCompDirectiveNoFileComp
		},
		Run: func(c *cobra.Command, _ []string) { _ = c.Root().Help() },
	}
}

// complete has shells offer values for a flag, each of several if it takes a list.
func complete(c *cobra.Command, flag string, values ...string) {
	_ = c.RegisterFlagCompletionFunc(flag, func(_ *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
		done := word[:strings.LastIndexByte(word, ',')+1]
		out := make([]string, len(values))
		for i, v := range values {
			out[i] = done + v
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	})
}

// notOneOf is the error of a flag whose value is none of those known.
func notOneOf(c *cobra.Command, flag, value string, known []string) error {
	best, distance := "", max(3, len(value)/3)
	for _, k := range known {
		if d := editDistance(value, k); d < distance {
			best, distance = k, d
		}
	}
	if best == "" {
		return usage(c.CommandPath()+" --help", "--%s: unknown %q; want one of %s", flag, value, strings.Join(known, ", "))
	}
	return usage(c.CommandPath()+" --"+flag+" "+best, "--%s: unknown %q; did you mean %q?", flag, value, best)
}

// wanted says in words what a flag of a Go type takes.
func wanted(kind string) string {
	switch kind {
	case "duration":
		return "a duration such as 5s"
	case "int", "uint64":
		return "a whole number"
	case "float64":
		return "a number"
	case "float64Slice":
		return "numbers with commas between them"
	case "distribution":
		return "a number, or a distribution such as uniform:100-500"
	case "bool":
		return "true or false"
	}
	return "text"
}

// flagError explains a flag that does not exist or has a bad value.
func flagError(c *cobra.Command, err error) error {
	if errors.Is(err, pflag.ErrHelp) {
		return err
	}
	if iv, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		return usage(c.CommandPath()+" --help", "--%s: %q; want %s", iv.GetFlag().Name, iv.GetValue(), wanted(iv.GetFlag().Value.Type()))
	}
	word := ""
	if ne, ok := errors.AsType[*pflag.NotExistError](err); ok {
		word = ne.GetSpecifiedName()
	}
	if word != "" {
		best, distance := "", 3
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if d := editDistance(word, f.Name); !f.Hidden && d < distance {
				best, distance = f.Name, d
			}
		})
		if best != "" {
			return usage(c.CommandPath()+" --"+best, "%w", err)
		}
	}
	return usage(c.CommandPath()+" --help", "%w", err)
}

// editDistance is the number of letters to insert, delete or change that make b out of a (Levenshtein).
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

const envAnnotation = "kvgate_env"

// envFlags lets environment variables KVGATE_NAME stand for the named flags of c, and says so in their help.
func envFlags(c *cobra.Command, names ...string) {
	for _, n := range names {
		f := c.Flags().Lookup(n)
		v := "KVGATE_" + strings.ToUpper(strings.NewReplacer("-", "_", ".", "_").Replace(n))
		f.Usage += " (environment: " + v + ")"
		f.Annotations = map[string][]string{envAnnotation: {v}}
	}
}

// fromEnvironment sets the flags of c that the command line left out.
func fromEnvironment(c *cobra.Command, lookup func(string) (string, bool)) (err error) {
	c.Flags().VisitAll(func(f *pflag.Flag) {
		names := f.Annotations[envAnnotation]
		if err != nil || f.Changed || len(names) == 0 {
			return
		}
		if v, ok := lookup(names[0]); ok && v != "" {
			if e := f.Value.Set(v); e != nil {
				err = usage("", "environment variable %s: %q; want %s", names[0], v, wanted(f.Value.Type()))
				return
			}
			f.Changed = true
		}
	})
	return err
}

// noArgs, atLeastOne and exactly check positional arguments; what names them.
func noArgs(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usage(c.CommandPath()+" --help", "%s takes no arguments; got %q", c.CommandPath(), args[0])
	}
	return nil
}

func atLeastOne(what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return usage(c.UseLine(), "%s needs %s", c.CommandPath(), what)
		}
		return nil
	}
}

func exactlyOne(what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usage(c.UseLine(), "%s needs %s; got %d arguments", c.CommandPath(), what, len(args))
		}
		return nil
	}
}

func commands(e *env) []*cobra.Command {
	c := []*cobra.Command{
		newServe(e), newCheck(e), newExplain(e), newTop(e), newEndpoints(e), newModels(e), newAdapters(e), newReload(e), newDrain(e), newReadmit(e), newHealthcheck(e),
		newCapture(e), newKeys(e),
		newConfig(e), newDemo(e), newSim(e), newReplay(e), newBench(e), newVersion(e), newCompletion(e), newMan(e),
	}
	return append(c, registries(e)...)
}
