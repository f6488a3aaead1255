package e2e

import (
	"debug/elf"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// An image is what the last stage of deploy/Dockerfile says.
type image struct {
	copies          map[string]string // from the build stage, to where
	uid, gid        uint32
	entrypoint, cmd []string
	health          []string
}

func readImage(t *testing.T) (im image) {
	t.Helper()
	data, err := os.ReadFile("../../deploy/Dockerfile")
	must(t, err)
	im.copies = map[string]string{}
	list := func(text string) (words []string) {
		t.Helper()
		if err := json.Unmarshal([]byte(text), &words); err != nil {
			t.Fatalf("%s: %v; want a JSON list, since the image has no shell", text, err)
		}
		return words
	}
	stage := ""
	for line := range strings.SplitSeq(strings.ReplaceAll(string(data), "\\\n", " "), "\n") {
		word, rest, _ := strings.Cut(line, " ")
		switch {
		case word == "FROM":
			stage = rest
		case stage != "scratch":
		case word == "COPY":
			f := strings.Fields(rest)
			if len(f) != 3 || f[0] != "--from=build" {
				t.Fatalf("COPY %s: the test knows --from=build SOURCE TARGET only", rest)
			}
			im.copies[f[1]] = f[2]
		case word == "USER":
			u, g, _ := strings.Cut(rest, ":")
			uid, err := strconv.ParseUint(u, 10, 32)
			must(t, err)
			gid, err := strconv.ParseUint(g, 10, 32)
			must(t, err)
			im.uid, im.gid = uint32(uid), uint32(gid)
		case word == "ENTRYPOINT":
			im.entrypoint = list(rest)
		case word == "CMD":
			im.cmd = list(rest)
		case word == "HEALTHCHECK":
			_, after, _ := strings.Cut(rest, "CMD ")
			im.health = list(after)
		}
	}
	if stage != "scratch" || im.uid == 0 {
		t.Fatalf("the last stage is FROM %s with user %d; want scratch and no root", stage, im.uid)
	}
	return im
}

// The image's file system holds what the Dockerfile copies and nothing else. In it, without a writable file and as its user,
// kvgate serves, is healthy, and drains.
func TestImage(t *testing.T) { onAMachine(t, runImage) }

func runImage(t *testing.T) {
	im := readImage(t)
	binary := kvgateBinary(t)
	if f, err := elf.Open(binary); err != nil {
		t.Fatal(err)
	} else if f.Section(".interp") != nil {
		t.Skip("this kvgate is linked dynamically, as the race detector wants")
	}
	root := filepath.Join(os.Getenv(inside), "root")
	sources := map[string]string{"/src/kvgate": binary, "/etc/ssl/certs/ca-certificates.crt": "/etc/ssl/certs/ca-certificates.crt"}
	for from, to := range im.copies {
		data, err := os.ReadFile(sources[from])
		if err != nil {
			t.Fatalf("COPY %s: %v", from, err)
		}
		must(t, os.MkdirAll(filepath.Join(root, filepath.Dir(to)), 0o755))
		must(t, os.WriteFile(filepath.Join(root, to), data, 0o755))
	}
	bringUp(t, "127.0.0.1")
	server := startSim(t)
	// What people mount.
	must(t, os.MkdirAll(filepath.Join(root, "etc/kvgate"), 0o755))
	text := fmt.Sprintf("drain: {delay: 0s}\npools: [{name: p, discovery: {static: [%q]}}]\n", server.URL())
	must(t, os.WriteFile(filepath.Join(root, "etc/kvgate/config.yaml"), []byte(text), 0o644))
	for dir := os.Getenv(inside); dir != "/"; dir = filepath.Dir(dir) { // a directory of tests is its owner's alone
		if st, err := os.Stat(dir); err == nil && st.Mode()&0o005 == 0 {
			must(t, os.Chmod(dir, 0o755))
		}
	}

	in := func(command ...string) *exec.Cmd {
		c := &exec.Cmd{Path: command[0], Args: command, Dir: "/", Env: []string{}}
		c.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: im.uid, Gid: im.gid}}
		return c
	}
	var log strings.Builder
	serve := in(append(im.entrypoint, im.cmd...)...)
	serve.Stderr = &log
	must(t, serve.Start())
	defer serve.Process.Kill()
	var said []byte
	var err error
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if said, err = in(im.health...).CombinedOutput(); err == nil || time.Now().After(deadline) {
			break
		}
	}
	if err != nil || string(said) != "ready\n" {
		t.Errorf("health check: %v, %s", err, said)
	}
	if err := ask("http://127.0.0.1:8080"); err != nil {
		t.Error(err)
	}
	must(t, serve.Process.Signal(syscall.SIGTERM))
	if err := serve.Wait(); err != nil {
		t.Errorf("it ends with %v\n%s", err, log.String())
	}
	if said, err = in(im.health...).CombinedOutput(); err == nil || !strings.Contains(string(said), "no answer from the admin listener") {
		t.Errorf("health check of nothing: %v, %s", err, said)
	}
}
