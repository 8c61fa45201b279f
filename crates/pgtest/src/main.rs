//! Gives a shell a PostgreSQL for as long as its standard input stays open: the owner that the tests kill.
//!
//! ```text
//! steadfast-pgtest cluster               a cluster of its own
//! steadfast-pgtest shared                the one that all tests share
//! steadfast-pgtest shared FOLDER IDLE    another shared one, which ends after IDLE seconds without anybody
//! ```
//!
//! It prints the URL.

use std::path::Path;
use std::time::Duration;
use std::{env, io, process};

use steadfast_pgtest::{Cluster, shared, shared_in};

fn main() {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["cluster"] => {
            let cluster = Cluster::start(&[]);
            keep(&cluster.url(""));
        }
        ["shared"] => {
            let shared = shared();
            keep(&shared.fresh_url());
        }
        ["shared", folder, idle] => {
            let idle = idle.parse().expect("IDLE is a number of seconds");
            let shared = shared_in(Path::new(folder), Duration::from_secs(idle));
            keep(&shared.fresh_url());
        }
        _ => {
            eprintln!("usage: steadfast-pgtest cluster | shared [FOLDER IDLE]");
            process::exit(2);
        }
    }
}

fn keep(url: &str) {
    println!("{url}");
    // What is said there means nothing, only that it ends.
    drop(io::copy(&mut io::stdin(), &mut io::sink()));
}
