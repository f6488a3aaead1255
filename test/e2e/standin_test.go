package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
)

// sudoCommand stands in for sudo where the test is root already.
func sudoCommand(args []string) int {
	c := exec.Command(args[0], args[1:]...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := c.Run()
	if ee, ok := errors.AsType[*exec.ExitError](err); ok {
		return ee.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sudo:", err)
		return 1
	}
	return 0
}

// managerSocket names the socket at which the test's service manager takes orders.
const managerSocket = "KVGATE_TEST_MANAGER"

// systemctlCommand stands in for systemctl: it has the test's service manager do it. The answer is "ok", or what went wrong.
func systemctlCommand(args []string) int {
	c, err := net.Dial("unix", os.Getenv(managerSocket))
	if err != nil {
		fmt.Fprintln(os.Stderr, "systemctl:", err)
		return 1
	}
	defer c.Close()
	fmt.Fprintln(c, strings.Join(args, " "))
	answer, err := io.ReadAll(bufio.NewReader(c))
	if text := strings.TrimSpace(string(answer)); err != nil || text != "ok" {
		fmt.Fprintln(os.Stderr, "systemctl:", text, err)
		return 1
	}
	return 0
}
