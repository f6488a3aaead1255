// Command kvgate is an inference gateway: a reverse proxy that sends each OpenAI-style request to the model
// server with the KV-cache space, the adapter and the prefix it needs.
package main

import (
	"os"

	"kvgate/internal/cli"
)

func main() {
	os.Exit(cli.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
