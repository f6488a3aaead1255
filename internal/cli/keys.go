package cli

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"kvgate/config"
	"kvgate/internal/auth"
	"kvgate/internal/caller"
	"kvgate/internal/gateway"
)

func newKeys(e *env) *cobra.Command {
	c := &cobra.Command{
		Use:   "keys new|hash|list",
		Short: "Make API keys, and the entries that let them in",
		Long: `Make API keys, and the entries of the file that auth.keys_file names. The file holds hashes: a key that is lost can be replaced,
not recovered. To rotate one, add a second key of the tenant, reload, have the clients change, and remove the first.`,
		Example: `  kvgate keys new --tenant team-a --file keys.yaml
  kvgate keys list keys.yaml`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newKeysNew(e), newKeysHash(e), newKeysList(e))
	return c
}

func newKeysNew(e *env) *cobra.Command {
	var k config.Key
	var expires, file string
	c := &cobra.Command{
		Use:   "new --tenant T [--id ID] [--models PATTERN,…] [--class C] [--expires WHEN] [--file FILE]",
		Short: "Make a key; print it, once, and its entry",
		Long: `Make a key of 256 random bits. With --file its entry is added to that file and the key alone is printed; without, the entry
is printed too, on standard error. Nothing else ever holds the key.`,
		Example: `  kvgate keys new --tenant team-a --models 'llama-*' --file keys.yaml
  kvgate keys new --tenant team-b --class high --expires 90d --file keys.yaml
  kvgate reload`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			if k.Tenant == "" {
				return usage("kvgate keys new --tenant team-a", "--tenant says whose key it is")
			}
			if _, ok := caller.ParseClass(k.Class); !ok {
				return usage("kvgate keys new --tenant "+k.Tenant+" --class high", "--class %q; want %s", k.Class, strings.Join(caller.Classes, ", "))
			}
			if expires != "" {
				t, err := expiry(expires, time.Now())
				if err != nil {
					return usage("kvgate keys new --tenant "+k.Tenant+" --expires 90d", "--expires %q; want a number of days such as 90d, or a date such as 2027-01-31", expires)
				}
				k.Expires = t.UTC().Format(time.RFC3339)
			}
			key := auth.NewKey()
			sum, _ := auth.Sum(key)
			k.Hash = "sha256:" + hex.EncodeToString(sum[:])
			if k.ID == "" {
				k.ID = k.Tenant + "-" + hex.EncodeToString(sum[:3])
			}
			text := k.Entry()
			if file == "" {
				fmt.Fprintf(e.stderr, "# for the file that auth.keys_file names\nkeys:\n%s", text)
			} else if err := addKey(file, text); err != nil {
				return err
			}
			fmt.Fprintln(e.stdout, key)
			return nil
		},
	}
	fl := c.Flags()
	fl.StringVar(&k.Tenant, "tenant", "", "whose key it is")
	fl.StringVar(&k.ID, "id", "", "what logs call it (default the tenant and six digits)")
	fl.StringSliceVar(&k.Models, "models", nil, "models and adapters that it may use, by names and patterns (default all)")
	fl.StringVar(&k.Class, "class", "normal", "priority class: low, normal or high")
	fl.StringVar(&expires, "expires", "", "when it stops being valid: 90d, or 2027-01-31 (default never)")
	fl.StringVar(&file, "file", "", "add its entry to this file, which is made if it is not there")
	complete(c, "class", caller.Classes...)
	return c
}

// expiry reads a number of days from now, or a date.
func expiry(s string, now time.Time) (time.Time, error) {
	if days, ok := strings.CutSuffix(s, "d"); ok {
		var n int
		if _, err := fmt.Sscanf(days, "%d", &n); err != nil || n < 1 || n > 36500 || fmt.Sprint(n) != days {
			return time.Time{}, errors.New("not a number of days")
		}
		return now.AddDate(0, 0, n), nil
	}
	if t, err := time.Parse(time.DateOnly, s); err == nil {
		return t, nil
	}
	return time.Parse(time.RFC3339, s)
}

// addKey adds an entry to a file of keys, and leaves it as it was if the result were not valid.
func addKey(file, entry string) error {
	old, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		old = []byte("# API keys of kvgate, by their hashes; kvgate keys new --file adds one.\nkeys:\n")
	case err != nil:
		return err
	case len(old) > 0 && old[len(old)-1] != '\n':
		old = append(old, '\n')
	}
	text := append(old, entry...)
	if _, err := config.ParseKeys(file, text, gateway.ConfigOptions()); err != nil {
		return withTry(fmt.Errorf("%s would not be valid with the new entry at its end:\n%w", file, err), "kvgate keys new without --file, and add what it prints by hand")
	}
	if real, err := filepath.EvalSymlinks(file); err == nil {
		file = real
	}
	// A reader sees the file before or after, never half of it. Who could read it still can.
	tmp := file + ".new"
	if err := os.WriteFile(tmp, text, 0o600); err != nil {
		return err
	}
	if fi, err := os.Stat(file); err == nil {
		if err := errors.Join(ownAs(tmp, fi), os.Chmod(tmp, fi.Mode().Perm())); err != nil {
			_ = os.Remove(tmp)
			return withTry(err, "kvgate keys new as the owner of the file, or without --file, and add what it prints by hand")
		}
	}
	return os.Rename(tmp, file)
}

func newKeysHash(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "hash",
		Short: "Print the hash of a key that there is, read from standard input",
		Long: `Print the hash of a key that there is already, for an entry in the file of keys. The key comes on standard input, since
others on this machine can read command lines. It must be random and 32 characters long at least: the hash is no protection for
one that can be guessed.`,
		Example: `  kvgate keys hash < key.txt`,
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			data, err := readAll(e.stdin, "standard input")
			if err != nil {
				return err
			}
			sum, ok := auth.Sum(strings.TrimSpace(string(data)))
			if !ok {
				return withTry(errors.New("what came on standard input is no key: it must be 32 printable characters at least, without spaces"), "kvgate keys new")
			}
			fmt.Fprintf(e.stdout, "sha256:%x\n", sum)
			return nil
		},
	}
}

func newKeysList(e *env) *cobra.Command {
	return &cobra.Command{
		Use:     "list FILE",
		Short:   "List the keys in a file of keys, and when they expire",
		Example: `  kvgate keys list keys.yaml`,
		Args:    exactlyOne("a file of keys"),
		RunE: func(_ *cobra.Command, args []string) error {
			data, err := readFile(args[0])
			if err != nil {
				return err
			}
			keys, err := config.ParseKeys(args[0], data, gateway.ConfigOptions())
			if err != nil {
				return err
			}
			return keysTable(e, keys, time.Now())
		},
	}
}

func keysTable(e *env, keys []config.Key, now time.Time) error {
	tw := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "ID\tTENANT\tCLASS\tMODELS\tEXPIRES")
	for i := range keys {
		k := &keys[i]
		models, expires := "all", "never"
		if k.Models != nil {
			models = strings.Join(k.Models, ", ")
		}
		if end := k.End(); !end.IsZero() {
			if expires = end.UTC().Format(time.RFC3339); !now.Before(end) {
				expires += " (expired)"
			}
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\n", k.ID, k.Tenant, k.Class, models, expires)
	}
	return tw.Flush()
}
