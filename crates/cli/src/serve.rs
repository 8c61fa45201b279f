//! `steadfast dev` and `steadfast serve`.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use clap::Args;
use steadfast::{Builder, Drained, Engine};
use steadfast_server::{Options, ServeError, Server};

use crate::exit::{Exit, chain};
use crate::output::print;
use crate::place::Place;
use crate::samples;

/// How long running steps may finish after the signal to stop.
const GRACE: Duration = Duration::from_secs(10);

/// Reads an address to listen on.
///
/// # Errors
/// In words for the command line.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "give an IP address and a port, for example 127.0.0.1:7420 or [::1]:7420".to_owned())
}

/// What both take.
#[derive(Debug, Args)]
struct Common {
    #[command(flatten)]
    place: Place,
    /// Address to listen on, as IP:PORT; loopback only until keys exist.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7420", value_parser = address)]
    listen: SocketAddr,
    /// How many workflows run at once.
    #[arg(long, value_name = "N", default_value_t = NonZeroUsize::new(64).expect("64 is not 0"))]
    concurrency: NonZeroUsize,
}

/// Runs a server with an embedded store and sample workflows.
#[derive(Debug, Args)]
pub struct Dev {
    #[command(flatten)]
    common: Common,
}

/// Runs a server.
#[derive(Debug, Args)]
pub struct Serve {
    #[command(flatten)]
    common: Common,
    /// Register the sample definitions of `dev`.
    #[arg(long)]
    samples: bool,
}

impl Common {
    fn builder(&self) -> Result<Builder, Exit> {
        // Before the store is opened, or made.
        steadfast_server::may_listen(self.listen).map_err(|error| cannot_listen(&error))?;
        Ok(Engine::open(&self.place.at()?.url())?.concurrency(self.concurrency.get()))
    }

    async fn run(&self, builder: Builder, banner: impl FnOnce(SocketAddr) -> String) -> Result<(), Exit> {
        let engine = builder.run()?;
        let server = match Server::bind(engine.clone(), Options::on(self.listen)).await {
            Ok(server) => server,
            Err(error) => {
                engine.shutdown(Duration::ZERO).await;
                return Err(cannot_listen(&error));
            }
        };
        // Before anybody is told that it listens: who knows of it may stop it.
        let mut interrupt = signal(tokio::signal::unix::SignalKind::interrupt())?;
        let mut terminate = signal(tokio::signal::unix::SignalKind::terminate())?;
        print(&banner(server.address()))?;
        let stop = async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            eprintln!("stopping: running steps may finish within {} s; a second signal ends at once", GRACE.as_secs());
        };
        let (told, stopping) = tokio::sync::oneshot::channel();
        server
            .run(async {
                stop.await;
                let _ = told.send(Instant::now());
            })
            .await;
        let begin = stopping.await.unwrap_or_else(|_| Instant::now());
        let shut = engine.shutdown(GRACE);
        let mut again = signal(tokio::signal::unix::SignalKind::interrupt())?;
        let mut again_terminate = signal(tokio::signal::unix::SignalKind::terminate())?;
        tokio::select! {
            drained = shut => eprintln!("{}", stopped(begin.elapsed(), &drained)),
            _ = again.recv() => eprintln!("ended at once; the next start goes on where this one stopped"),
            _ = again_terminate.recv() => eprintln!("ended at once; the next start goes on where this one stopped"),
        }
        Ok(())
    }
}

/// What is said at the end of a drain.
fn stopped(took: Duration, drained: &Drained) -> String {
    let steps = |n: usize, one, many| {
        if n == 1 { format!("1 running step {one}") } else { format!("{n} running steps {many}") }
    };
    let mut told = Vec::new();
    if drained.given_back > 0 {
        told.push(steps(drained.given_back, "was given back", "were given back") + ", at no cost of an attempt");
    }
    if drained.left > 0 {
        told.push(steps(
            drained.left,
            "did not yield and is given back later",
            "did not yield and are given back later",
        ));
    }
    if told.is_empty() {
        told.push("every running step has ended".to_owned());
    }
    format!("stopped after {:.1} s: {}", took.as_secs_f64(), told.join("; "))
}

fn cannot_listen(error: &ServeError) -> Exit {
    let code = if matches!(error, ServeError::NotLoopback { .. }) { 6 } else { 1 };
    Exit::new(code, "cannot_listen", chain(error))
}

fn signal(kind: tokio::signal::unix::SignalKind) -> Result<tokio::signal::unix::Signal, Exit> {
    tokio::signal::unix::signal(kind).map_err(|error| Exit::other(format!("listen for signals: {error}")))
}

pub(crate) async fn dev(dev: Dev) -> Result<(), Exit> {
    let mut builder = dev.common.builder()?;
    let mut lines = String::new();
    for (definition, example, what) in samples::all() {
        let name = definition.name().to_owned();
        lines += &format!("  {name:<8} {what}\n           steadfast start {name} --input '{example}' --wait\n");
        builder = builder.define(definition);
    }
    let at = dev.common.place.at()?;
    let banner = move |address: SocketAddr| {
        let server =
            if address.port() == 7420 { String::new() } else { format!("export STEADFAST_URL=http://{address}\n") };
        format!(
            "listening on http://{address}\nstore {}\n\nsamples to start from another terminal:\n{server}{lines}\n\
             then: steadfast list, steadfast show ID, steadfast events ID\n\
             over HTTP: curl -s http://{address}/v1/workflows -H 'content-type: application/json' \
             -d '{{\"name\": \"hello\", \"input\": {{\"steps\": 3}}}}'\n",
            at.shown()
        )
    };
    dev.common.run(builder, banner).await
}

pub(crate) async fn serve(serve: Serve) -> Result<(), Exit> {
    let mut builder = serve.common.builder()?;
    if serve.samples {
        for (definition, _, _) in samples::all() {
            builder = builder.define(definition);
        }
    } else {
        tracing::info!("no definitions are registered: workflows are admitted and kept, and wait for a worker");
    }
    serve.common.run(builder, |address| format!("listening on http://{address}\n")).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_says_what_became_of_each_step() {
        let said = |given_back, left| {
            let took = Duration::from_millis(1_240);
            stopped(took, &Drained { took, given_back, left })
        };
        assert_eq!(said(0, 0), "stopped after 1.2 s: every running step has ended");
        assert_eq!(said(1, 0), "stopped after 1.2 s: 1 running step was given back, at no cost of an attempt");
        assert_eq!(said(0, 2), "stopped after 1.2 s: 2 running steps did not yield and are given back later");
        assert_eq!(
            said(2, 1),
            "stopped after 1.2 s: 2 running steps were given back, at no cost of an attempt; \
             1 running step did not yield and is given back later"
        );
    }
}
