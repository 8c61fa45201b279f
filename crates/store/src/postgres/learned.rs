//! Learned: what the connections of one store have learned of its servers, shared by all of them.
//!
//! # Timelines
//! A promotion raises the timeline of a cluster. Where the primary before it lives on, both take writes, and what is
//! written to the one before is lost. So the highest timeline that any connection has met counts, for the life of the
//! process: a server below it is left, and not connected to again. Other clusters, by their number, are not compared.
//!
//! The timeline in the store's own row says nothing here: the row comes with the server, whose timeline is never lower.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::session::Server;

/// What is known by now.
#[derive(Debug, Default)]
pub(super) struct Learned {
    /// This place is behind a pooler after all.
    is_pooled: AtomicBool,
    /// The highest timeline of each cluster.
    timelines: Mutex<BTreeMap<String, i64>>,
}

impl Learned {
    pub(super) fn is_pooled(&self) -> bool {
        self.is_pooled.load(Ordering::Relaxed)
    }

    pub(super) fn met_pooler(&self) {
        self.is_pooled.store(true, Ordering::Relaxed);
    }

    /// Notes a server that takes writes.
    pub(super) fn met(&self, server: &Server) {
        if !server.is_comparable() {
            return;
        }
        let mut timelines = self.timelines.lock().unwrap_or_else(PoisonError::into_inner);
        let highest = timelines.entry(server.system.clone()).or_insert(server.timeline);
        if *highest < server.timeline {
            tracing::warn!(
                before = *highest,
                now = server.timeline,
                "another server of the cluster was promoted; the one before is not used any more"
            );
            *highest = server.timeline;
        }
    }

    /// The timeline on which this server's cluster has gone on without it.
    pub(super) fn overtaken_by(&self, server: &Server) -> Option<i64> {
        let timelines = self.timelines.lock().unwrap_or_else(PoisonError::into_inner);
        timelines.get(&server.system).copied().filter(|highest| server.is_comparable() && server.timeline < *highest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is met, one after the other, and whether it is used.
    #[test]
    fn a_server_on_an_earlier_timeline_of_the_same_cluster_is_not_used() {
        let learned = Learned::default();
        let mut told = String::new();
        for (system, timeline) in
            [("a", 1), ("a", 2), ("a", 1), ("b", 1), ("a", 0), ("", 7), ("", 1), ("a", 4), ("a", 2), ("a", 4)]
        {
            let server = Server { system: system.to_owned(), timeline };
            learned.met(&server);
            let word = match learned.overtaken_by(&server) {
                None => "used".to_owned(),
                Some(by) => format!("overtaken by {by}"),
            };
            told += &format!("{system:1} {timeline} {word}\n");
        }
        assert_eq!(
            told,
            "a 1 used\na 2 used\na 1 overtaken by 2\nb 1 used\na 0 used\n  7 used\n  1 used\na 4 used\n\
             a 2 overtaken by 4\na 4 used\n"
        );
    }
}
