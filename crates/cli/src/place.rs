//! Place: where a store is.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use steadfast::store::postgres::{PostgresReader, is_postgres};
use steadfast::store::sqlite::SqliteReader;
use steadfast::store::{Reader, StoreError};

use crate::exit::Exit;

/// `--data DIR` or `--store URL`.
#[derive(Debug, Clone, Args)]
pub struct Place {
    /// Folder of the embedded store.
    #[arg(long, value_name = "DIR", default_value = "./steadfast-data", conflicts_with = "store")]
    data: PathBuf,
    /// The store itself: sqlite:PATH, or postgres://USER:PASSWORD@HOST/DATABASE?schema=NAME.
    #[arg(long, value_name = "URL", env = "STEADFAST_STORE", hide_env_values = true)]
    store: Option<String>,
}

/// A store, by what holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum At {
    /// An SQLite file.
    File(PathBuf),
    /// A PostgreSQL database, by its URL.
    Postgres(String),
}

impl At {
    /// Reads a URL, or a path.
    ///
    /// # Errors
    /// For a URL of another kind.
    pub fn read(url: &str) -> Result<Self, Exit> {
        if is_postgres(url) {
            return Ok(Self::Postgres(url.to_owned()));
        }
        match url.split_once(':') {
            Some(("sqlite", path)) => Ok(Self::File(PathBuf::from(path.strip_prefix("//").unwrap_or(path)))),
            Some((scheme, _)) if !Path::new(url).exists() && !scheme.contains('/') => Err(Exit::refused(
                "invalid_store",
                format!(
                    "the store has the scheme {scheme}, which this release cannot open; give sqlite:PATH or postgres://.."
                ),
            )),
            _ => Ok(Self::File(PathBuf::from(url))),
        }
    }

    /// The URL.
    pub fn url(&self) -> String {
        match self {
            Self::File(path) => format!("sqlite:{}", path.display()),
            Self::Postgres(url) => url.clone(),
        }
    }

    /// How it is shown: without a password.
    pub fn shown(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Postgres(url) => steadfast::store::postgres::Place::parse(url)
                .map_or_else(|_| "a PostgreSQL database".to_owned(), |place| place.to_string()),
        }
    }

    /// Opens it for reading only.
    ///
    /// # Errors
    /// When there is no store.
    pub fn reader(&self) -> Result<Arc<dyn Reader>, StoreError> {
        Ok(match self {
            Self::File(path) => Arc::new(SqliteReader::open(path)?),
            Self::Postgres(url) => Arc::new(PostgresReader::open(url)?),
        })
    }
}

impl Place {
    /// Where it is.
    ///
    /// # Errors
    /// For a URL of a kind that cannot be opened.
    pub fn at(&self) -> Result<At, Exit> {
        match &self.store {
            Some(url) => At::read(url),
            None => Ok(At::File(self.data.join("steadfast.db"))),
        }
    }
}
