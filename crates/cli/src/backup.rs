//! `steadfast backup`.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use crate::exit::Exit;
use crate::output::print;
use crate::place::{At, Place};

/// Copies a store, whole and of one moment. Whoever opens the copy raises its epoch: every claim in it is void.
#[derive(Debug, Args)]
pub struct Backup {
    /// The file to make; refused when it exists.
    to: PathBuf,
    #[command(flatten)]
    place: Place,
    /// One JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

impl Backup {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let from = match self.place.at()? {
            At::File(path) => path,
            At::Postgres(_) => {
                let message = "a PostgreSQL store is backed up with its database: pg_dump or pg_basebackup; after a \
                               restore run steadfast migrate --restored";
                return Err(Exit::refused("unsupported", message));
            }
        };
        let to = self.to.clone();
        tokio::task::spawn_blocking(move || steadfast::store::sqlite::backup(&from, &to))
            .await
            .map_err(|error| Exit::other(error.to_string()))??;
        let bytes = std::fs::metadata(&self.to).map_or(0, |metadata| metadata.len());
        if self.json {
            return print(&json!({ "backup": self.to, "bytes": bytes }).to_string());
        }
        print(&format!("{} ({:.1} MB)", self.to.display(), bytes as f64 / 1e6))
    }
}
