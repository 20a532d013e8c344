// A DNS server for cluster names alone: three of CoreDNS's plugins instead of all of them, which halves the build.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() {
	// Plugins answer in this order, so errors of the last one are logged by the one before it.
	dnsserver.Directives = []string{"bind", "errors", "kubernetes"}
	coremain.Run()
}
